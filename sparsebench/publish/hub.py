"""Uploading a submission to the Hugging Face Hub, as a data set with a card.

All files go up in one commit, so a data set never has a part of them; a second call uploads only what has changed. The
token is that of `huggingface_hub`, from its own file or HF_TOKEN: it is neither stored nor printed here.
"""

from __future__ import annotations

import re
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

import huggingface_hub
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id

from sparsebench.errors import UserError, plain, text_of
from sparsebench.publish import replays
from sparsebench.publish.collection import WITHDRAWN
from sparsebench.publish.submission import MANIFEST, Verdict, files_of

CARD, ATTRIBUTES, KIND = "README.md", ".gitattributes", "dataset"
MOST_SECONDS = 60
BY_OTHERS = (replays.FOLDER, WITHDRAWN)
NAME = re.compile(r"[A-Za-z0-9._-]+/[A-Za-z0-9._-]+")
REASONS = {
    401: "the token is refused",
    403: "the token may not write there",
    404: "there is no such user or data set, or the token may not see it",
    409: "the data set has changed meanwhile",
    412: "the data set has changed meanwhile",
}
"""What the status of an answer says."""


class Upload(NamedTuple):
    """A data set after an upload.

    Attributes:
        address: its page.
        changed: whether the upload has changed it.
        kept: files by others that it has and the folder lacks: replays, and a withdrawal.
    """

    address: str
    changed: bool
    kept: list[str]


def address_of(name: str) -> str:
    """Return the page of the data set USER/NAME. Raise UserError if it is not a name."""
    allowed = "USER/NAME of letters, digits, '-', '_' and '.'"
    if not NAME.fullmatch(name):
        raise UserError("--hub", got=f"'{plain(name, 80)}'", allowed=allowed)
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UserError(f"--hub: {plain(error, 300)}", allowed=allowed) from error
    return f"{_without_user(HfApi().endpoint)}/datasets/{name}"


def upload(folder: Path, verdict: Verdict, card: str, name: str) -> Upload:
    """Upload a submission and its card to the data set USER/NAME, which is made if it is missing.

    The submission is the folder <strategy>/<version> of the data set, which has no other submission, because its card
    is of one. Files of an earlier upload that the submission no longer has are removed. Replays and a withdrawal stay,
    because others may have added them.

    Raises:
        UserError: there is no token, the data set has other files or another submission, or the upload failed.
    """
    address = address_of(name)
    token = huggingface_hub.get_token()
    if not token:
        raise UserError("there is no token for the Hub", next_step="`hf auth login` stores one, or set HF_TOKEN")
    huggingface_hub.logging.set_verbosity_error()
    if not sys.stderr.isatty():
        huggingface_hub.utils.disable_progress_bars()
    api = HfApi(token=token, library_name="sparsebench")
    try:
        with warnings.catch_warnings(action="ignore"):  # by the client, about the libraries that it uses
            return _commit(api, folder, verdict, card, name, address)
    except UserError:
        raise
    except Exception as error:  # the client lets errors of several libraries through
        raise UserError(
            f"{address}: {_reason(error, token)}", next_step="the upload is not confirmed; the same command tries again"
        ) from None  # the cause may contain the token


def _commit(api: HfApi, folder: Path, verdict: Verdict, card: str, name: str, address: str) -> Upload:
    """Make the data set if it is missing, and commit all files that differ."""
    api.create_repo(name, repo_type=KIND, exist_ok=True)
    before = api.dataset_info(name, timeout=MOST_SECONDS)
    present = {file.rfilename for file in before.siblings or ()}
    place = f"{verdict.strategy}/{verdict.version}"
    _check_files(present, name, place)

    files = {f"{place}/{path.relative_to(folder).as_posix()}": path for path in files_of(folder)}
    operations: list[CommitOperationAdd | CommitOperationDelete] = [CommitOperationAdd(CARD, card.encode())]
    operations += [CommitOperationAdd(path_in_repo, path) for path_in_repo, path in files.items()]
    others = sorted(file for file in present - set(files) if file.startswith(f"{place}/"))
    kept = [file for file in others if file.removeprefix(f"{place}/").partition("/")[0] in BY_OTHERS]
    operations += [CommitOperationDelete(file) for file in others if file not in kept]
    message = f"Records of {place}"
    commit = api.create_commit(name, operations, commit_message=message, repo_type=KIND, parent_commit=before.sha)
    return Upload(address, commit.oid != before.sha, kept)


def _check_files(present: set[str], name: str, place: str) -> None:
    """Raise UserError if a data set has another submission, or files and none: its card is then not of this one."""
    others = sorted(present - {ATTRIBUTES})
    submissions = {
        file.removesuffix(f"/{MANIFEST}") for file in others if re.fullmatch(f"[^/]+/[^/]+/{MANIFEST}", file)
    }
    if submissions - {place}:
        raise UserError(
            f"{name} has another submission, and its card is not replaced",
            got=plain(min(submissions - {place}), 100),
            next_step="name another data set",
        )
    if others and not submissions:
        raise UserError(
            f"{name} has files and no submission, and none is overwritten",
            got=plain(others[0], 100),
            next_step="name another data set",
        )


def _reason(error: BaseException, token: str) -> str:
    """Return why an upload failed, in one line without the token."""
    first: BaseException | None = error
    while first is not None and not isinstance(first, HfHubHTTPError):
        first = first.__cause__
    response = getattr(first, "response", None)
    known = REASONS.get(response.status_code) if response is not None else None
    if known:
        return known
    text = text_of(error if error.__cause__ is None else error.__cause__)
    text = _without_user(text.replace(token, "[token]"))  # before it is cut, which may leave a part of the token
    return plain(" ".join(text.split()), 300) or type(error).__name__


def _without_user(text: str) -> str:
    """Return a text whose addresses have no user or password before the host."""
    return re.sub(r"//[^/@\s]*@", "//", text)
