"""Save sample rollouts of a checkpoint as JSON lines: `lfo rollouts` with the option names of the documents.

python scripts/save_trajectories.py --checkpoint runs/x --num_samples 10 --output rollouts.jsonl

`--checkpoint` is a run folder or one of its checkpoints, such as runs/x/checkpoints/step-000050.
"""

import argparse
import sys

from lfo.cli import main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--num_samples", default="10")
    parser.add_argument("--output", required=True)
    options, others = parser.parse_known_args()  # other options go to `lfo rollouts`
    sys.argv = ["lfo", "rollouts", options.checkpoint, "--num", options.num_samples, "--output", options.output]
    sys.argv += others
    main()
