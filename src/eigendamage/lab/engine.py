"""Runs cells: one after another, in several processes of this machine, or on Ray."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from typing import Any

import torch

from eigendamage.checks import require_choice, require_number, require_whole
from eigendamage.lab.cells import result_in, run
from eigendamage.lab.settings import Cell, Pruning, Site, as_data, from_data, name_of
from eigendamage.lab.steps import Content
from eigendamage.progress import track

ENGINES = ("serial", "ray")
# How often Ray starts a cell again whose worker was killed; the cell goes on from its last checkpoint.
RETRIES = 5


@dataclass(frozen=True)
class Engine:
    """How cells run. Nothing of it changes their results."""

    name: str = "serial"
    jobs: int = 1  # processes on this machine; on Ray, CPUs of a local cluster
    address: str | None = None  # of an existing Ray cluster
    gpus_per_cell: float = 0.0
    retries: int = RETRIES

    def __post_init__(self) -> None:
        require_choice("engine", self.name, ENGINES)
        require_whole("jobs", self.jobs, least=1)
        require_number("gpus_per_cell", self.gpus_per_cell, "at least 0", lambda x: x >= 0)


class CellsFailed(RuntimeError):
    """Some cells failed; ``results`` are those of the others."""

    def __init__(self, message: str, results: list[Content]) -> None:
        super().__init__(message)
        self.results = results


def run_cells(cells: Sequence[Cell], site: Site, engine: Engine | None = None) -> list[Content]:
    """The results of all cells, in order. Dense networks that several of them need are trained first, once.

    Raises:
        CellsFailed: One line for each cell that failed, after all others have run.
    """
    engine = engine or Engine()
    dense = {name_of(cell.dense): cell.dense for cell in cells if isinstance(cell, Pruning) and cell.dense.training}
    rest = [cell for cell in cells if name_of(cell) not in dense]
    results, failures = _run_stage(list(dense.values()), site, engine, "training dense networks")
    missing = dense.keys() - results.keys()
    able = [cell for cell in rest if not (isinstance(cell, Pruning) and name_of(cell.dense) in missing)]
    more, others = _run_stage(able, site, engine, "running cells")
    results, failures = results | more, failures + others
    if failures:
        lines = [f"{len(failures)} of {len(dense) + len(rest)} cells failed:", *failures]
        raise CellsFailed("\n".join(lines), [results[name_of(cell)] for cell in cells if name_of(cell) in results])
    return [results[name_of(cell)] for cell in cells]


def _run_stage(cells: Sequence[Cell], site: Site, engine: Engine, title: str) -> tuple[dict[str, Content], list[str]]:
    """Results by name, and a line for each cell that failed."""
    results = {name_of(cell): found for cell in cells if (found := result_in(site.root / name_of(cell), cell)) is not None}
    left = {name_of(cell): as_data(cell) for cell in cells if name_of(cell) not in results}
    failures: list[str] = []
    if not left:
        return results, failures
    if engine.name == "ray":
        outcomes = on_ray(run_data, left, site, engine)
    elif engine.jobs > 1:
        outcomes = in_processes(run_data, left, site, engine.jobs)
    else:
        outcomes = one_by_one(run_data, left, site)
    for name, outcome in track(outcomes, title, site.progress, len(left)):
        if isinstance(outcome, Exception):
            failures.append(f"{name}: {outcome}")
        else:
            results[name] = outcome
    return results, failures


Outcomes = Iterator[tuple[str, "Content | Exception"]]
Task = Callable[[Content, Site], Content]


def run_data(content: Content, site: Site) -> Content:
    return run(from_data(content), site)


def one_by_one(task: Task, cells: dict[str, Content], site: Site) -> Outcomes:
    """A cell that fails does not keep the others from running, but a program's own mistake stops it at once."""
    for name, content in cells.items():
        try:
            yield name, task(content, site)
        except (ValueError, OSError) as error:
            yield name, error


def in_processes(task: Task, cells: dict[str, Content], site: Site, jobs: int) -> Outcomes:
    """Several processes, useful where one cannot keep a GPU busy."""
    threads = max(1, torch.get_num_threads() // jobs)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, _begin, (threads,)) as pool:
        quiet = replace(site, progress=False)
        futures = {pool.submit(task, content, quiet): name for name, content in cells.items()}
        try:
            for future in as_completed(futures):
                yield futures[future], _outcome(future)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _begin(threads: int) -> None:
    torch.set_num_threads(threads)


def _outcome(future: Future[Content]) -> Content | Exception:
    error = future.exception()
    if error is None:
        return future.result()
    if isinstance(error, Exception):
        return error
    raise error


def on_ray(task: Task, cells: dict[str, Content], site: Site, engine: Engine) -> Outcomes:
    """On the Ray cluster at ``engine.address``, whose machines share the folders of ``site``, or on one started here."""
    try:
        import ray
    except ImportError:
        raise ValueError('engine: "ray" needs Ray; install it with: pip install "eigendamage[ray]"') from None
    started = not ray.is_initialized()
    if started:
        _start(ray, engine)
    try:
        remote = ray.remote(max_retries=engine.retries, num_cpus=1, num_gpus=engine.gpus_per_cell)(task)
        here = replace(site, root=site.root.resolve(), data=site.data.resolve(), weights=site.weights.resolve(), progress=False)
        names = {remote.remote(content, here): name for name, content in cells.items()}
        waiting = list(names)
        while waiting:
            (done, *_), waiting = ray.wait(waiting)
            try:
                yield names[done], ray.get(done)
            except ray.exceptions.RayError as error:
                yield names[done], ValueError(_cause(error))
    finally:
        if started:
            ray.shutdown()


def _start(ray: Any, engine: Engine) -> None:
    quiet = {"logging_level": "ERROR", "log_to_driver": False}
    if engine.address is not None:
        ray.init(address=engine.address, **quiet)
        return
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # what later versions do, and earlier ones warn of
    ray.init(address="local", num_cpus=engine.jobs, include_dashboard=False, **quiet)


def _cause(error: Exception) -> str:
    """One line: Ray's messages hold a whole traceback."""
    cause = getattr(error, "cause", None) or error
    return next((line for line in reversed(str(cause).splitlines()) if line.strip()), type(cause).__name__).strip()
