"""An experiment from one call: its cells are run, its results gathered, its report written."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from eigendamage.charts import svg
from eigendamage.figures import Code, Figure, Section, TableData
from eigendamage.files import write_text
from eigendamage.lab.engine import CellsFailed, Engine, run_cells
from eigendamage.lab.experiments import experiment_named, sections_of
from eigendamage.lab.results import read_results, write_results
from eigendamage.lab.scales import Changes, scaled
from eigendamage.lab.settings import Site
from eigendamage.lab.steps import Content
from eigendamage.report import markdown, write_page


def reproduce(
    name: str,
    scale: str = "small",
    changes: Changes | None = None,
    only: Sequence[str] = (),
    *,
    root: Path = Path("runs"),
    data: Path = Path("data"),
    results: Path = Path("results"),
    device: str = "cpu",
    engine: Engine | None = None,
    commands: Sequence[str] = (),
    progress: bool = True,
) -> Path:
    """Run the cells of an experiment that have no result yet; the file ``results/NAME.json`` gets them all.

    Args:
        name: in `EXPERIMENTS`.
        scale: in `SCALES`.
        changes: of the scale.
        only: cells whose names match one of these patterns, such as ``"cifar10-vgg19-*-ratio0.9-*"``; all by default.
        root: folders of runs; cells that experiments share are run once.
        data: the folder of data sets.
        results: the folder of the file.
        device: as torch names it.
        engine: how cells run; one after another by default.
        commands: what led here, for the record.
        progress: show bars on a terminal.

    Raises:
        ValueError: For names and changes that do not fit.
        CellsFailed: Some cells failed; the others have their results, and the next call runs what is left.
    """
    experiment = experiment_named(name)
    size = scaled(name=scale, changes=changes)
    weights = size.weights or Path()
    site = Site(root, data, weights if weights.is_dir() else weights.parent, device, progress)
    cells = experiment.cells(size)
    if not cells:
        raise ValueError(f"networks: {name} at scale {scale} has no cells of {', '.join(size.only)}")
    cells = [cell for cell in cells if not only or any(fnmatch(cell.label, pattern) for pattern in only)]
    if not cells:
        raise ValueError(f"only: {name} at scale {scale} has no cell whose name matches {' or '.join(map(repr, only))}")
    path = results / f"{name}.json"
    try:
        found = run_cells(cells, site, engine)
    except CellsFailed as error:
        write_results(path, name, commands, error.results)
        raise
    write_results(path, name, commands, found)
    return path


def write_report(path: Path, out: Path) -> None:
    """The page of a file of results."""
    content = read_results(path)
    name, cells = content["experiment"], content["cells"]
    sections = [*sections_of(name, cells), Section("Commands", [Code(content["commands"] or ["–"])])]
    out.parent.mkdir(parents=True, exist_ok=True)
    write_page(out, experiment_named(name).title, _summary(cells), sections)


def _summary(cells: Sequence[Content]) -> str:
    devices = sorted({cell["versions"]["device"] for cell in cells})
    return f"{len(cells)} runs on {', '.join(devices)}."


def _shown(path: Path) -> str:
    """As seen from here, and without where it lies if that is elsewhere: pages are read on other machines."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else path.name if path.is_absolute() else str(path)


def write_docs(paths: Sequence[Path], folder: Path) -> Path:
    """``results.md`` with its pictures in ``folder``, from files of results alone."""
    folder.mkdir(parents=True, exist_ok=True)
    command = f"eigendamage reproduce --from-results {' '.join(map(_shown, paths))} --docs {_shown(folder)}"
    lines = ["# Results", "", f"Drawn from files of results alone: `{command}`", ""]
    for path in paths:
        content = read_results(path)
        name = content["experiment"]
        pictures = 0
        for section in sections_of(name, content["cells"]):
            lines += [f"## {section.title}", "", _summary(content["cells"]), ""]
            for part in section.parts:
                if isinstance(part, Figure):
                    pictures += 1
                    file = folder / f"{name}-{pictures}.svg"
                    write_text(file, svg(part))
                    lines += [f"![{part.title}]({file.name})", "", *([part.note, ""] if part.note else [])]
                elif isinstance(part, TableData):
                    lines += [markdown(part), ""]
                elif isinstance(part, Code):
                    lines += ["```sh", part.text, "```", ""]
                else:
                    lines += [part, ""]
        lines += ["```sh", *content["commands"], "```", ""]
    out = folder / "results.md"
    write_text(out, "\n".join(lines).rstrip() + "\n")
    return out
