"""Silence transformers while it loads a model, and turn its failures into one-line errors."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from polyhead.errors import CheckpointError, OptionError, PolyheadError
from polyhead.files import in_one_line
from polyhead.sources.model_source import check_transformers

_NO_CONVERSION = "DISABLE_SAFETENSORS_CONVERSION"
_NO_CONNECTION = ("ConnectError", "ConnectTimeout")  # classes of httpx, in whichever version the hub uses
_PAUSE = 1.0  # seconds between two attempts to connect


@contextmanager
def quiet(*, progress: bool) -> Iterator[None]:
    """Silence the output of transformers while it loads; restores its settings on exit.

    For a hub model without safetensors, transformers would trigger a conversion service; this is disabled as well,
    since reading a model must not change anything on the hub.
    """
    check_transformers()
    from huggingface_hub.utils import logging as hub_logging
    from transformers import modeling_gguf_pytorch_utils as gguf
    from transformers.utils import logging

    with ExitStack() as restore:
        restore.callback(logging.set_verbosity, logging.get_verbosity())
        logging.set_verbosity_error()
        restore.callback(_restore_variable, _NO_CONVERSION, os.environ.get(_NO_CONVERSION))
        os.environ[_NO_CONVERSION] = "1"
        if not progress:
            restore.callback(hub_logging.set_verbosity, hub_logging.get_verbosity())
            hub_logging.set_verbosity_error()  # it logs every attempt to reach the hub
            restore.callback(setattr, gguf, "tqdm", gguf.tqdm)
            gguf.tqdm = logging.tqdm  # the one progress bar that ignores transformers' own setting
            if logging.is_progress_bar_enabled():
                restore.callback(logging.enable_progress_bar)
                logging.disable_progress_bar()
        yield


def _restore_variable(name: str, value: str | None) -> None:
    if value is None:
        del os.environ[name]
    else:
        os.environ[name] = value


@contextmanager
def describe_failure(name: str, location: str, *, local: bool) -> Iterator[None]:
    """Convert exceptions of transformers and the hub while loading into one-line errors.

    Without a connection to the hub, a model that is not in its cache is refused at once: transformers would try each
    of several files for half a minute.
    """
    from safetensors import SafetensorError

    try:
        if not local and not _is_available(name):
            raise _unreachable(name)
        yield
    except PolyheadError:
        raise
    except SafetensorError as error:
        raise CheckpointError(
            f"the weights of {name} must be complete .safetensors files, got: {in_one_line(error)}"
        ) from error
    except ImportError as error:
        raise OptionError(f"{name} needs a package that is not installed: {in_one_line(error)}") from error
    except Exception as error:  # a damaged config can cause any exception in transformers
        raise _failure(error, name, location, local) from error


def _failure(error: Exception, name: str, location: str, local: bool) -> PolyheadError:
    kinds = {type(cause).__name__ for cause in _causes(error)}
    message = " ".join(str(cause) for cause in _causes(error))
    if "trust_remote_code" in message or "custom code" in message:
        return OptionError(
            f"{name} requires custom code, which would run on this machine; read it at "
            f"{location if local else 'https://huggingface.co/' + name} and, if you trust it, allow it "
            "(trust_remote_code=True)"
        )
    if not local:
        if "GatedRepoError" in kinds:
            return OptionError(
                f"{name} is a gated model: accept its terms at https://huggingface.co/{name}, then log in with: "
                "hf auth login"
            )
        if "RepositoryNotFoundError" in kinds:
            return OptionError(
                f"there is no model {name} on the Hugging Face hub and no folder of that name here; "
                "for a private model log in with: hf auth login"
            )
        if "cannot be loaded with `safetensors`" in message:
            return CheckpointError(
                f"weights must be .safetensors, which cannot contain code, got {name} without any on the hub; "
                "if you trust its source, allow pickles (allow_pickle=True)"
            )
        if kinds & {"LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectError", "ConnectionError"}:
            return _unreachable(name)
    return CheckpointError(f"{name} cannot be loaded: {in_one_line(error)}")


def _unreachable(name: str) -> OptionError:
    return OptionError(
        f"the Hugging Face hub cannot be reached and {name} is not in its cache; "
        "use a local folder, or tiny, the model that comes with polyhead"
    )


def _is_available(name: str) -> bool:
    """Return whether a model is in the cache of the hub, or the hub can be reached.

    Only two failures to connect count, so that downloads keep the retries of `huggingface_hub` for all other errors.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    for pause in (_PAUSE, 0.0):
        try:
            if try_to_load_from_cache(name, "config.json") is None:
                get_hf_file_metadata(hf_hub_url(name, "config.json"))  # a single request, without retries
            return True
        except Exception as error:  # noqa: BLE001 - if it persists, loading raises it again, after its retries
            if type(error).__name__ not in _NO_CONNECTION:
                return True
            time.sleep(pause)
    return False


def _causes(error: BaseException) -> Iterator[BaseException]:
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__ or current.__context__
