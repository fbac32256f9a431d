"""What went wrong on the Hub, in one sentence with a remedy."""

from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub.errors import HfHubHTTPError, HTTPError

_REMEDIES = {
    401: "it does not know you: run `hf auth login`, or set HF_TOKEN",
    403: "your token may not write there: use one that may write, or a repository of your own",
    404: "there is no such repository or branch, or your token may not see it",
    409: "something else was committed meanwhile: look at the repository, then run the command again",
    412: "something else was committed meanwhile: look at the repository, then run the command again",
    413: "a file or the commit is larger than it accepts: save the model in smaller shards (max_shard_size)",
    429: "too many requests: wait, then run the command again",
}


class PushError(OSError):
    """A push that the Hub did not take."""


@contextmanager
def as_push_error(what: str) -> Iterator[None]:
    """Turn every error of a request to the Hub into a `PushError`.

    Args:
        what: What is not done when it fails, such as "nothing was committed to owner/name".
    """
    try:
        yield
    except PushError:
        raise
    except (HTTPError, OSError) as error:
        raise PushError(f"{what}: {explain(error)}") from error
    except RuntimeError as error:  # the library's around an error of an upload
        if not isinstance(error.__cause__, HTTPError | OSError):
            raise
        raise PushError(f"{what}: {error} {explain(error.__cause__)}") from error


def explain(error: Exception) -> str:
    """Return one sentence about an error of the Hub, and what to do."""
    if isinstance(error, HfHubHTTPError) and error.response is not None:
        status = error.response.status_code
        if status in _REMEDIES:
            return f"the Hub refused ({status}); {_REMEDIES[status]}"
        if status >= 500:
            return f"the Hub failed ({status}); run the command again later"
    message = " ".join(str(error).split()) or type(error).__name__
    if type(error).__name__.endswith("Timeout"):
        return f"the Hub did not answer in time ({type(error).__name__}); run the command again later"
    if isinstance(error, HTTPError) and not isinstance(error, HfHubHTTPError):
        return f"no connection to the Hub, or it broke off ({message}): is HF_ENDPOINT right, is there a network?"
    return message
