"""Upload the final model of a run, with its card, to the Hugging Face hub.

Importing this file imports neither torch nor huggingface_hub.
"""

from __future__ import annotations

import os
from pathlib import Path

from groupwise.errors import ConfigError, StorageError
from groupwise.runs.final_model import whole_final
from groupwise.runs.folder import finished


def push(
    run: str | Path, repository: str, *, private: bool = False, message: str | None = None
) -> str:
    """Upload `final/` of a finished run and return the address of the commit.

    run: a run folder.  repository: `ORG/NAME`; it is made if it is not there.  private: for a
        repository that is made.  message: of the commit.
    The token is the one of `hf auth login`, or HF_TOKEN.  Raises CheckpointError if the run has no
    whole final model, ConfigError for a repository or a token that the hub refuses, StorageError
    if the upload fails.
    """
    model = whole_final(run)
    folder = model.parent
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        raise ConfigError("HF_HUB_OFFLINE is 1, which forbids an upload: unset it")

    import huggingface_hub
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        HTTPError,  # pyright: ignore[reportPrivateImportUsage]
    )

    if huggingface_hub.get_token() is None:
        raise ConfigError("there is no token of the hub: run `hf auth login`, or set HF_TOKEN")
    hub = huggingface_hub.HfApi(library_name="groupwise")
    try:
        hub.create_repo(repository, private=private, exist_ok=True)
        commit = hub.upload_folder(
            repo_id=repository,
            folder_path=model,
            commit_message=message
            or f"Step {finished(folder)} of {folder.name}, trained with Groupwise",
        )
    except HFValidationError as error:
        raise ConfigError(f"{repository!r} names no repository of the hub: {error}") from error
    except HfHubHTTPError as error:
        words = str(error).strip().splitlines()[0]
        if error.response is not None and error.response.status_code in (401, 403):
            raise ConfigError(
                f"the hub refuses {repository!r} with this token: {words}; the token needs the"
                " right to write there"
            ) from error
        raise StorageError(f"the upload to {repository} failed: {words}") from error
    except (HTTPError, OSError) as error:  # of httpx or httpx2, by the version of the hub's package
        raise StorageError(f"the upload to {repository} failed: {error}") from error
    return commit.commit_url
