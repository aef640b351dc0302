"""Every exception that a user of art_ray may see.

::

    ArtRayError
    ├── ConfigError (ValueError)            a value that was asked for cannot work
    │   ├── UnknownKeyError                 a configuration key that does not exist
    │   ├── InvalidNameError                a project, name or split that is no path part
    │   ├── UnknownBaseModelError           a base model that cannot be loaded
    │   └── UnsupportedLoraError            a LoRA target that is absent, or that the engine ignores
    ├── NotRegisteredError (ValueError)     the model has no backend yet
    ├── ResourcesError (RuntimeError)       the cluster lacks what was asked for
    ├── LedgerError (RuntimeError)          the ledger could not remember something
    │   ├── LedgerWriteError (OSError)      disk full, read-only, no permission
    │   ├── LedgerFormatError (ValueError)  a file that this version cannot read
    │   └── UnknownMetricError (ValueError) a metric that is not in the history
    ├── TooManyExceptionsError (RuntimeError)   more rollouts failed than `max_exceptions` allows
    ├── CheckpointError (RuntimeError)      a checkpoint that is absent, incomplete or altered
    ├── TrainingError (RuntimeError)        a training step that cannot be taken
    │   └── NonFiniteError                  losses or gradients that stay non-finite
    ├── ServingError (RuntimeError)         the policy cannot be served
    │   ├── EngineError                     the engine failed to start, or died; carries its last words
    │   └── VersionNotServedError (LookupError)     a policy version that no server holds
    ├── DeadlineError (TimeoutError)        a wait that ended without its answer; names what it waited for
    └── ActorError (RuntimeError)           a call to an actor failed
        └── ActorDiedError                  the actor, or its node, is gone

Each takes one message and pickles with all that it carries, so that it crosses process boundaries unchanged.
"""

from __future__ import annotations

__all__ = [
    "ActorDiedError",
    "ActorError",
    "ArtRayError",
    "CheckpointError",
    "ConfigError",
    "DeadlineError",
    "EngineError",
    "InvalidNameError",
    "LedgerError",
    "LedgerFormatError",
    "LedgerWriteError",
    "NonFiniteError",
    "NotRegisteredError",
    "ResourcesError",
    "ServingError",
    "TooManyExceptionsError",
    "TrainingError",
    "UnknownBaseModelError",
    "UnknownKeyError",
    "UnknownMetricError",
    "UnsupportedLoraError",
    "VersionNotServedError",
]


class ArtRayError(Exception):
    """The root: `except ArtRayError` catches whatever this package raises on purpose."""

    def __init__(self, message: str = "") -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[object, ...]:
        # An OSError keeps these beside its attributes, and forgets them where it was made of one text.
        of_disk = {name: getattr(self, name, None) for name in ("errno", "strerror", "filename", "filename2")}
        return type(self), self.args, {**self.__dict__, **{k: v for k, v in of_disk.items() if v is not None}}


class ConfigError(ArtRayError, ValueError):
    """A configuration value that cannot work."""


class UnknownKeyError(ConfigError):
    """A configuration key that does not exist; the message names the nearest one that does."""


class InvalidNameError(ConfigError):
    """A project, model name or split that cannot become part of a path."""


class UnknownBaseModelError(ConfigError):
    """A base model that is neither a readable folder nor a reachable hub id."""


class UnsupportedLoraError(ConfigError):
    """A LoRA target that the base model lacks, or that the serving engine would silently ignore."""


class NotRegisteredError(ArtRayError, ValueError):
    """An operation that needs a backend, on a model that has none."""


class ResourcesError(ArtRayError, RuntimeError):
    """The cluster cannot hold what was asked for; the message says what was asked, present and missing."""


class LedgerError(ArtRayError, RuntimeError):
    """The ledger could not remember or recall something."""


class LedgerWriteError(LedgerError, OSError):
    """A file of the ledger could not be written; what was there before is unharmed."""


class LedgerFormatError(LedgerError, ValueError):
    """A file of the ledger that this version cannot read."""


class UnknownMetricError(LedgerError, ValueError):
    """A metric that is not in the history; the message names the nearest ones that are."""


class TooManyExceptionsError(ArtRayError, RuntimeError):
    """More rollouts failed than `max_exceptions` allows; the cause is the last failure."""


class CheckpointError(ArtRayError, RuntimeError):
    """A checkpoint that is absent, incomplete, or does not match its manifest."""


class TrainingError(ArtRayError, RuntimeError):
    """A training step that cannot be taken."""


class NonFiniteError(TrainingError):
    """Losses or gradients were non-finite too many times in a row."""


class ServingError(ArtRayError, RuntimeError):
    """The policy cannot be served."""


class EngineError(ServingError):
    """The engine failed to start, or died; the message carries its own last words."""


class VersionNotServedError(ServingError, LookupError):
    """A policy version that no server holds; the message names those that are held."""


class DeadlineError(ArtRayError, TimeoutError):
    """A wait that ended without its answer; the message names actor, method, node and what was awaited."""


class ActorError(ArtRayError, RuntimeError):
    """A call to an actor failed; the message carries its traceback."""


class ActorDiedError(ActorError):
    """The actor that was called, or its node, is gone."""
