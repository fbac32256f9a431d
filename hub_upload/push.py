"""Push what conjoin saved to the Hub: the same as `conjoin push`, from a clone.

Usage: python hub_upload/push.py SOURCE OWNER/NAME [--type model|dataset|metric] [--public] [--dry-run] ...
"""

import sys

from conjoin.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["push", *sys.argv[1:]]))
