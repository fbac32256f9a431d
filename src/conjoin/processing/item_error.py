"""The error of an item or a row that cannot be used.

Every saved checkpoint contains this file, so it imports nothing of this package.
"""


class ItemError(ValueError):
    """An item cannot be used.

    Attributes:
        item: Its name, such as `item 3` or `row 5 (id 'a')`.
        message: What is wrong with it.
    """

    def __init__(self, item: str, message: str) -> None:
        super().__init__(item, message)
        self.item, self.message = item, message

    def __str__(self) -> str:
        return f"{self.item}: {self.message}"


class MissingFileError(ItemError, FileNotFoundError):
    """The file of an item's image does not exist."""
