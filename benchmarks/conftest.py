"""The fixtures that tests share."""

from fixtures import *  # noqa: F403
