"""`python -m limes` is the `limes` command."""

from limes.cli import main

raise SystemExit(main())
