"""Show predicted and actual replies of a checkpoint: `lfo inspect` with the option names of the documents.

python scripts/inspect_world_model.py --checkpoint runs/x --rollout rollouts.jsonl

`--checkpoint` is a run folder or one of its checkpoints. The default of `--rollout` is the newest file of the run.
"""

import argparse
import sys

from lfo.cli import main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True)
    options, others = parser.parse_known_args()  # other options go to `lfo inspect`
    sys.argv = ["lfo", "inspect", options.checkpoint, *others]
    main()
