"""``python -m attncore``: the same as the ``attncore`` command."""

from attncore.cli import main

raise SystemExit(main())
