"""The exceptions that this package raises on purpose.

    LfoError                  the message is one sentence that says what to do
    ├── UsageError            the user's mistake: a bad option, config or input file       exit 2
    │   ├── ConfigError       an unknown key, a wrong type or an impossible value
    │   └── DataError         a damaged or truncated data file; the message names the line
    └── WorkError             the work failed: a NaN loss, a full disk                     exit 1
        ├── DamageError       a file that a run wrote is missing or has changed; nothing of it was touched
        └── EnvironmentFailed an environment raised or hung in one rollout

The command line prints the message and exits with the code. Nothing else catches these exceptions, except that the
rollout runner turns `EnvironmentFailed` into data.
"""


def first_line(error: BaseException, otherwise: str = "no message") -> str:
    """Return the first line of an exception's message, which may have many lines or none."""
    return (str(error).strip().splitlines() or [otherwise])[0]


class LfoError(Exception):
    """The base of all exceptions raised on purpose; the message is one sentence for the user."""

    exit_code = 1


class UsageError(LfoError):
    exit_code = 2


class ConfigError(UsageError):
    pass


class DataError(UsageError):
    pass


class WorkError(LfoError):
    pass


class DamageError(WorkError):
    pass


class EnvironmentFailed(WorkError):
    pass
