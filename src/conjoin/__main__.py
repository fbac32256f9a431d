"""`python -m conjoin`, and `accelerate launch -m conjoin`."""

import sys

from conjoin.cli.main import main

sys.exit(main())
