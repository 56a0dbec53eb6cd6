"""Write the phone-call world to files; the same as `lfo generate`, with the options in snake_case.

python scripts/generate_environment.py --num_companies 100 --num_train_tasks 500 --num_val_tasks 100 --output_dir data
"""

import re
import sys

from lfo.cli import main

if __name__ == "__main__":
    # Only the option's name changes, never a value behind "=".
    options = [re.sub(r"^--[\w-]+", lambda name: name[0].replace("_", "-"), word) for word in sys.argv[1:]]
    sys.argv = ["lfo", "generate", *options]
    main()
