from attncore.testing.suite import *  # noqa: F403

BACKEND = "reference"
