"""Predicted beside actual replies of a checkpoint; the same as `lfo inspect`, under the names of the documents.

python scripts/inspect_world_model.py --checkpoint runs/x --rollout rollouts.jsonl

`--checkpoint` is a run's folder or one checkpoint in it; without `--rollout`, the run's newest rollouts are shown.
"""

import argparse
import sys

from lfo.cli import main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True)
    options, others = parser.parse_known_args()  # the others are those of `lfo inspect`
    sys.argv = ["lfo", "inspect", options.checkpoint, *others]
    main()
