"""One replica: an engine, the versions it holds, and the door through which the front reaches it.

The engine and its server live in a thread with an event loop of its own, so that whoever owns the replica stays
responsive while vLLM starts, loads and serves. One engine per process: it sets environment variables for its start.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import shutil
import socket
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from art_ray.errors import ArtRayError, ConfigError, DeadlineError, EngineError, ServingError
from art_ray.serving.adapter import AdapterVersion, LoadedVersion, digest
from art_ray.serving.canary import Canary, check_canary, probe
from art_ray.serving.door import Door
from art_ray.serving.guard import TAG, Guard, processes_of, sweep, variables_set
from art_ray.serving.last_words import LastWords
from art_ray.serving.listener import bound_socket
from art_ray.serving.merge import BaseWeights
from art_ray.serving.spec import Endpoint, EngineSpec
from art_ray.serving.vllm_server import VLLMServer, environment, event_loop

__all__ = ["Endpoint", "Engine", "EngineSpec", "LoadedVersion"]

T = TypeVar("T")


class Engine:
    """One vLLM engine with its OpenAI endpoint. All methods are idempotent and may be called from any event loop.

    Args:
        spec: what to serve; nothing is started yet.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._server = VLLMServer(spec)
        self._last_words = LastWords(passed_on=spec.serving.show_engine_log)
        self._guard: Guard | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started: concurrent.futures.Future[Endpoint] = concurrent.futures.Future()
        self._stopping = False
        self._held: dict[int, str] = {}
        """Hash of each loaded version, by step."""
        self._written: dict[int, str] = {}
        """Hash of each version that lies in shared memory, by step."""
        self._loading = asyncio.Lock()
        self._stop = asyncio.Event()
        self._base: BaseWeights | None = None
        """What each adapter is added to, or compared with; None where the base model's files cannot be read."""
        self._canaries: dict[int | None, Canary] = {}
        """By version; None is the base model."""

    async def start(self) -> Endpoint:
        """Starts the engine and returns where it is reached. It serves no version until one is loaded.

        Raises:
            ConfigError: an argument that vLLM does not have or accept.
            EngineError: the engine cannot start; carries its last words.
            DeadlineError: it was not ready within `start_timeout_s`.
        """
        if self._thread is None:
            sweep()
            self._guard = Guard()
            self._thread = threading.Thread(target=self._run, name="serving", daemon=True)
            self._thread.start()
        timeout_s = self._spec.serving.start_timeout_s
        try:
            return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(self._started)), timeout_s)
        except TimeoutError:
            await self.stop()
            raise DeadlineError(
                f"the engine for {self._spec.base_model} was not ready within {timeout_s:g} s "
                f"(ServingConfig.start_timeout_s). Its last words:\n{self._last_words.text()}"
            ) from None

    async def stage(self, adapter: AdapterVersion) -> None:
        """Checks a version and writes what loading it needs, while requests go on.

        Raises:
            ServingError: altered on its way, or made for another base model.
        """
        await self._in_loop(self._staged_once(adapter))

    async def load(self, adapter: AdapterVersion) -> LoadedVersion:
        """Loads a version and checks it; merged weights are changed in place, and no request may be running.

        Raises:
            ServingError: altered on its way, refused by the engine, or without effect on the canary's answer. An
                adapter is not held then; of merged weights none are.
            EngineError: the engine is not there; carries its last words.
        """
        return await self._in_loop(self._load(adapter))

    async def unload(self, step: int) -> None:
        """Unloads a version that nobody asks for any more; merged weights stay until others take their place."""
        await self._in_loop(self._unload(step))

    async def probe(self) -> None:
        """Has the engine compute one token.

        Raises:
            EngineError: the engine is not there; carries its last words.
        """
        await self._in_loop(self._server.canary(None))

    async def sleep(self) -> None:
        """Gives the device's memory back: weights to the host, the cache to nobody. No request may be running."""
        await self._in_loop(self._server.sleep())

    async def wake(self) -> None:
        """Takes the device's memory again and puts the weights back."""
        await self._in_loop(self._server.wake())

    def status(self) -> dict[str, Any]:
        """Returns the versions held and the engine's health. Never waits."""
        failure = self._failure()
        if self._stopping:
            state = "stopped"
        elif failure is not None:
            state = "failed"
        elif self._started.done():
            state = "running"
        else:
            state = "not started" if self._thread is None else "starting"
        return {
            "state": state,
            "failure": failure,
            "weights": self._server.weights,
            "versions": dict(self._held),
        }

    async def stop(self) -> None:
        """Ends the engine's processes and removes its files from shared memory."""
        self._stopping = True
        loop, thread = self._loop, self._thread
        if loop is not None and thread is not None and thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the loop ended meanwhile
                loop.call_soon_threadsafe(self._stop.set)
        await asyncio.to_thread(self._end, thread)

    def _end(self, thread: threading.Thread | None) -> None:
        if thread is not None and self._started.done():
            thread.join(10.0)
        if self._guard is not None:
            self._guard.end()
        if thread is not None:
            thread.join(10.0)

    # --- the serving thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._start_engine()
            with asyncio.Runner(loop_factory=event_loop) as runner:
                runner.run(self._serve())
        except BaseException as error:  # whatever it was, it belongs to the caller of `start`
            if self._guard is not None:
                self._guard.end()  # first: the last words are complete once all processes have ended
            if not self._started.done():
                self._started.set_exception(self._told(error))
        finally:
            if not self._started.done():
                self._started.set_exception(EngineError("the engine was stopped while it started"))

    def _start_engine(self) -> None:
        assert self._guard is not None
        with variables_set({**environment(self._spec), TAG: self._guard.run}), self._last_words.redirected():
            self._server.start_engine()

    async def _serve(self) -> None:
        import uvicorn

        self._loop = asyncio.get_running_loop()
        self._canaries[None] = Canary(await self._server.canary(None), {})
        try:
            self._base = BaseWeights(self._server.base_folder())
        except ConfigError:
            if self._server.weights == "merged":
                raise
        sock = bound_socket(self._spec.host)
        config = uvicorn.Config(
            Door(await self._server.application(), api_key=self._spec.api_key, failure=self._failure),
            log_config=None,
            access_log=False,
            lifespan="on",
            ws="none",
        )
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        while not server.started:
            if serving.done():
                raise EngineError("the engine's server ended while it started") from serving.exception()
            await asyncio.sleep(0.01)
        assert self._guard is not None
        self._guard.note_segments()
        self._started.set_result(self._endpoint(sock))
        await self._stop.wait()
        server.should_exit = True
        await asyncio.wait([serving], timeout=1.0)
        server.force_exit = True  # clients that are still being answered do not hold up the end
        await asyncio.wait([serving], timeout=5.0)
        self._server.shut_down()

    def _endpoint(self, sock: socket.socket) -> Endpoint:
        assert self._guard is not None
        host, port = sock.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        return Endpoint(
            url=f"http://{shown}:{port}",
            pid=os.getpid(),
            engine_pids=tuple(processes_of(self._guard.run)),
            weights=self._server.weights,
            max_model_len=self._server.max_model_len,
            refused_fields=self._server.refused_fields,
        )

    async def _load(self, adapter: AdapterVersion) -> LoadedVersion:
        started = time.monotonic()
        async with self._loading:
            if self._is_held(adapter):
                change = 0.0
            else:
                found = await self._staged(adapter)
                load = self._load_beside if self._server.weights == "adapter" else self._load_in_place
                change = await load(adapter, found)
        return LoadedVersion(adapter.step, adapter.sha256, time.monotonic() - started, canary_change=change)

    def _is_held(self, adapter: AdapterVersion) -> bool:
        """Returns whether this very version is loaded; raises where its step is, with other contents."""
        found = self._held.get(adapter.step, adapter.sha256)
        if found != adapter.sha256:
            raise ServingError(
                f"{self._spec.name}@{adapter.step} is loaded with hash {found[:12]}…; another adapter "
                f"({adapter.sha256[:12]}…) under the same step is refused: a version never changes"
            )
        return adapter.step in self._held

    async def _staged_once(self, adapter: AdapterVersion) -> None:
        async with self._loading:
            if not self._is_held(adapter):
                await self._staged(adapter)

    async def _staged(self, adapter: AdapterVersion) -> str:
        """Writes what loading `adapter` needs, unless it lies there already; returns the hash of what was written."""
        adapter.check()
        directory = self._directory(adapter.step)
        if self._written.get(adapter.step) != adapter.sha256:
            await asyncio.to_thread(shutil.rmtree, directory, True)
            if self._base is not None:
                check = self._base.check if self._server.weights == "adapter" else self._base.check_mergeable
                await asyncio.to_thread(check, adapter)
            self._written[adapter.step] = await asyncio.to_thread(_written, adapter, directory)
        return self._written[adapter.step]

    async def _load_beside(self, adapter: AdapterVersion, found: str) -> float:
        """Loads an adapter beside those that are held; returns how far the canary's answer moved."""
        try:
            await self._server.add(adapter, self._directory(adapter.step))
            return await self._checked(adapter, found, adapter.step)
        except BaseException:
            await self._forget(adapter.step)
            raise

    async def _load_in_place(self, adapter: AdapterVersion, found: str) -> float:
        """Puts weights with `adapter` in them into the engine's place; returns how far the canary's answer moved.

        If it fails in the middle, no version is held: the engine answers nothing until another one is loaded.
        """
        try:
            self._held.clear()
            await self._server.merge(adapter, self._directory(adapter.step))
            change = await self._checked(adapter, found, None)
            self._server.call_weights(adapter.step)
        finally:
            self._written.pop(adapter.step, None)
            await asyncio.to_thread(shutil.rmtree, self._directory(adapter.step), True)
        self._canaries = {None: self._canaries[None], adapter.step: self._canaries[adapter.step]}
        return change

    async def _unload(self, step: int) -> None:
        async with self._loading:
            if self._server.weights == "adapter":
                await self._forget(step)

    async def _forget(self, step: int) -> None:
        self._held.pop(step, None)
        self._canaries.pop(step, None)
        self._written.pop(step, None)
        await self._server.remove(step)
        shutil.rmtree(self._directory(step), ignore_errors=True)

    async def _checked(self, adapter: AdapterVersion, found: str, loaded: int | None) -> float:
        """Notes a version as held after its hash and canary were checked; returns how far the canary moved.

        Args:
            adapter: the version.
            found: hash of what the engine was given.
            loaded: the adapter to ask the engine for; None where it is in the weights.
        """
        if found != adapter.sha256:
            raise ServingError(f"version {adapter.step} was altered while it was written to shared memory")
        base = self._canaries[None]
        previous = self._canaries[max((step for step in self._canaries if step is not None), default=None)]
        canary = Canary(await self._server.canary(loaded), await asyncio.to_thread(probe, adapter))
        check_canary(adapter.step, canary, base, previous, self._server.dtype)
        self._canaries[adapter.step] = canary
        self._held[adapter.step] = found
        return canary.change_from(previous)

    def _directory(self, step: int) -> Path:
        assert self._guard is not None
        return self._guard.directory / f"version-{step}"

    # --- both sides ---------------------------------------------------------------------------------------------

    def _failure(self) -> str | None:
        if self._started.done() and (error := self._started.exception()) is not None:
            return str(error)
        ended = self._server.failure()
        return None if ended is None else f"{ended}\n{self._last_words.text(timeout_s=0.0)}"

    def _told(self, error: BaseException) -> Exception:
        if isinstance(error, ArtRayError):
            return error
        words = self._last_words.text()
        return EngineError(
            f"the engine for {self._spec.base_model} could not start: {type(error).__name__}: {error}"
            + (f"\nIts last words:\n{words}" if words else "")
        )

    async def _in_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` in the serving thread and returns its result."""
        state, failure = self.status()["state"], self._failure()
        if state != "running" or self._loop is None:
            work.close()
            if state == "failed":
                raise EngineError(f"the engine of {self._spec.name!r} died. Its last words:\n{failure}")
            raise EngineError(f"the engine of {self._spec.name!r} is {state}; start it first")
        try:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))
        except ArtRayError:
            raise
        except Exception as error:
            failure = self._failure()
            raise EngineError(
                f"the engine of {self._spec.name!r} failed: {type(error).__name__}: {error}"
                + (f"\nIts last words:\n{failure}" if failure else "")
            ) from error


def _written(adapter: AdapterVersion, directory: Path) -> str:
    """Writes the adapter's files and returns the hash of what can be read back."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True, mode=0o700)
    for name, content in adapter.files.items():
        (directory / name).write_bytes(content)
    return digest({name: (directory / name).read_bytes() for name in adapter.files})
