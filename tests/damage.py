"""Damaged files: a flipped bit or a cut, and what reading them gives."""

import random


def damages(name, content, flips, ends):
    """A file's content with a flipped bit at seeded places, and cut."""
    rng = random.Random(name)
    for _ in range(flips if content else 0):
        place, bit = rng.randrange(len(content)), rng.randrange(8)
        yield f"bit {bit} of byte {place}", content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :]
    for end in ends:
        yield f"cut at {end}", content[:end]


def wrong_after_damage(path, read, right, known, flips, ends, named=""):
    """Read after each damage of a file.

    Args:
        path: The file.
        read: What reads it.
        right: What that returns as long as the file is whole.
        known: The file by a name that is the same in every run.
        flips: How many bits are flipped, one at a time.
        ends: Where the file is cut, given its content.
        named: What an error must name.

    Returns:
        What was wrong, how often the damage was an error, and how often the file was damaged.
    """
    content, wrong, noticed, tries = path.read_bytes(), [], 0, 0
    for damage, damaged in damages(known, content, flips, ends(content)):
        path.write_bytes(damaged)
        tries += 1
        try:
            if read() != right:
                wrong.append(f"{path.name}, {damage}: another result")
        except (ValueError, OSError) as error:
            noticed += 1
            if named not in str(error):
                wrong.append(f"{path.name}, {damage}: not named by {str(error)[:160]!r}")
        except BaseException as error:
            wrong.append(f"{path.name}, {damage}: {type(error).__name__} {str(error)[:160]}")
    path.write_bytes(content)
    return wrong, noticed, tries
