"""Every exception that this package raises on purpose.

    LfoError                  something went wrong and one sentence says what to do
    ├── UsageError            the caller's fault: a bad option, config or input file       exit 2
    │   ├── ConfigError       an unknown key, an ill-typed or impossible value
    │   └── DataError         a damaged or truncated data file, named with its line
    └── WorkError             the work itself failed: a NaN loss, a full disk              exit 1
        └── EnvironmentFailed an environment raised or hung, in one rollout

The command line turns them into one sentence and an exit code; nothing else catches them, except
`EnvironmentFailed`, which the rollout runner turns into data.
"""


class LfoError(Exception):
    """Base of all errors raised on purpose; the message is one sentence for a person."""

    exit_code = 1


class UsageError(LfoError):
    exit_code = 2


class ConfigError(UsageError):
    pass


class DataError(UsageError):
    pass


class WorkError(LfoError):
    pass


class EnvironmentFailed(WorkError):
    pass
