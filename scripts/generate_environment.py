"""Write the phone-call world to files: `lfo generate` with options in snake_case.

python scripts/generate_environment.py --num_companies 100 --num_train_tasks 500 --num_val_tasks 100 --output_dir data
"""

import re
import sys

from lfo.cli import main

if __name__ == "__main__":
    # Change only the name of an option, not a value after "=".
    options = [re.sub(r"^--[\w-]+", lambda name: name[0].replace("_", "-"), word) for word in sys.argv[1:]]
    sys.argv = ["lfo", "generate", *options]
    main()
