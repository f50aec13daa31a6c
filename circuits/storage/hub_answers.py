"""What the model hub answers to questions about a model, or why it does not."""

from collections.abc import Callable
from typing import TypeVar

from ..errors import QkovError, reason

Answer = TypeVar("Answer")


def full_name(repository: str) -> str:
    """Return a model's name with its organisation, which the hub knows for old names such as gpt2.

    Args:
        repository: The name of a model.

    Raises:
        QkovError: The hub does not answer, or has no such model.
    """
    if "/" in repository:
        return repository
    from huggingface_hub import HfApi

    return asked(repository, lambda: HfApi().model_info(repository).id)


def files_in(repository: str) -> list[str]:
    """Return the paths of all files of a model, in the hub's order.

    Args:
        repository: `organisation/model`.

    Raises:
        QkovError: The hub does not answer, or has no such model.
    """
    from huggingface_hub import HfApi

    return asked(repository, lambda: HfApi().list_repo_files(repository))


def asked(repository: str, question: Callable[[], Answer]) -> Answer:
    """Return the hub's answer to a question about a model.

    Args:
        repository: The name of the model, for messages.
        question: Asks the hub by its own client.

    Raises:
        QkovError: The hub does not answer, or has no such model.
    """
    # huggingface_hub is slow to import, and only a run on the hub needs it.
    from huggingface_hub.errors import OfflineModeIsEnabled, RepositoryNotFoundError

    try:
        return question()
    except QkovError:
        raise
    except RepositoryNotFoundError as error:
        raise QkovError(
            f"the hub has no model {repository}, or it is private and this machine is not logged in (hf auth login)"
        ) from error
    except OfflineModeIsEnabled as error:
        raise QkovError(
            f"HF_HUB_OFFLINE is set, so the hub cannot be queried for {repository}; unset it or use a local path"
        ) from error
    except Exception as error:  # the client passes on what its own libraries raise
        raise QkovError(f"the hub does not answer for {repository} ({reason(error)}): check the connection") from error
