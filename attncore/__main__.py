"""``python -m attncore``: the same as the ``attncore`` command."""

import sys

from attncore.search_path import without_current_folder

sys.path[:] = without_current_folder()

from attncore.cli import main  # noqa: E402  a file of the current folder is none of the modules that this imports

raise SystemExit(main())
