"""Write the tables of the documents from the files in results/: ``make tables``.

A page marks the place of a table with two comments:

    <!-- table: NAME -->
    <!-- end -->

``TABLES`` maps each name to the function that describes the table: it reads records with ``Results`` and
returns Markdown. To add a table, write such a function, add its name to ``TABLES``, mark the place and run
``make tables``. ``python -m tools.tables --check`` writes nothing and names the tables that disagree with
their files.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from driftgen.errors import InputError, unknown_name
from driftgen.support.atomic_write import atomic_write
from tools import (
    ablation_tables,
    blind_spots,
    cifar10_tables,
    cluster_estimate,
    document_tables,
    evaluator_tables,
    experiments,
    gallery,
    guide_tables,
    layer_distances,
    parameter_table,
    policy_tables,
    reliability_table,
    serve_tables,
    small_set_tables,
    speed_tables,
)
from tools.records import Results

ROOT = Path(__file__).parents[1]
# Markers stand on lines of their own, so that a sentence can mention them.
BLOCK = re.compile(
    r"^<!-- table: (?P<name>[^\n]*?) -->\n(?P<body>.*?)^<!-- end -->$", re.DOTALL | re.MULTILINE
)
PAGES = ("*.md", "docs/*.md", "results/**/*.md")
MARKER = re.compile(r"^<!-- (?:table: [^\n]*|end) -->$", re.MULTILINE)

Table = Callable[[Results], str]

TABLES: dict[str, Table] = {
    "readme": document_tables.readme,  # README.md
    "performance": document_tables.performance,  # docs/performance.md
    "busy-cores": document_tables.busy_cores,  # docs/performance.md
    "initialization": document_tables.initialization,  # docs/health.md
    "health": guide_tables.health,  # docs/health.md
    "troubleshooting": guide_tables.troubleshooting,  # docs/troubleshooting.md
    "commands": guide_tables.commands,  # docs/commands.md
    "parameters": parameter_table.table,  # docs/models.md
    "many-gpus": cluster_estimate.table,  # docs/scaling.md
    "small-sets": small_set_tables.evaluations,  # results/small-sets/README.md
    "small-sets-training": small_set_tables.trainings,
    "reliability": reliability_table.table,  # docs/reliability.md
    "playground": document_tables.playground,  # docs/playground.md
    "browser": document_tables.browser,  # docs/browser.md
    "studio": document_tables.studio,  # docs/studio.md
    "first-hour": document_tables.first_hour,  # docs/own-images.md
    "gallery": gallery.gallery,  # results/README.md
    "earlier-versions": document_tables.earlier_versions,  # results/README.md
    "identifiability": document_tables.identifiability,  # results/identifiability/README.md
    "evaluator-check": evaluator_tables.evaluator_check,  # results/evaluator/README.md
    "evaluator-ways": evaluator_tables.evaluator_ways,  # results/evaluator/README.md, docs/evaluation.md
    "evaluator-time": evaluator_tables.evaluator_time,  # results/evaluator/README.md
    "ablations": ablation_tables.summary,  # results/ablations/README.md
    "cifar10": cifar10_tables.evaluations,  # results/cifar10/README.md
    "cifar10-curve": cifar10_tables.curve,  # results/cifar10/README.md
    "cifar10-copies": cifar10_tables.copies,  # results/cifar10/README.md
    "cifar10-hours": cifar10_tables.hours,  # results/cifar10/README.md
    "encoders": experiments.encoders,  # results/cifar10/experiments.md
    "generators": experiments.generators,  # results/cifar10/experiments.md
    "comparisons": experiments.comparisons,  # results/cifar10/experiments.md
    "blind-spots": blind_spots.table,  # results/cifar10/experiments.md
    "blind-spots-pretrained": blind_spots.pretrained,
    "layer-distances": layer_distances.table,
    "policy-scores": policy_tables.scores,  # results/policy/README.md, docs/policies.md
    "policy-trials": policy_tables.trials,  # results/policy/README.md
    "policy-pusht-spread": policy_tables.pusht_spread,  # results/policy/README.md
    "policy-spread": policy_tables.spread,  # results/policy/README.md, docs/policies.md
    "serve-load": serve_tables.load,  # docs/serving.md
    "serve-load-gpu": serve_tables.load_gpu,  # docs/serving.md
    "serve-load-cifar10-gpu": serve_tables.load_cifar10_gpu,  # docs/serving.md
    "serve-faults": serve_tables.faults,  # docs/serving.md
    "serve-faults-gpu": serve_tables.faults_gpu,  # docs/serving.md
    "policy-latency": policy_tables.latency,  # results/policy/README.md, docs/policies.md
    "cifar10-variants": speed_tables.cifar10_variants,  # results/cifar10/experiments.md
    "cifar10-parts": speed_tables.cifar10_parts,  # results/cifar10/experiments.md
    "large-groups": speed_tables.large_groups,  # docs/performance.md
    "h200-loss": speed_tables.loss,  # results/speed-h200/README.md, as are all below
    "h200-step": speed_tables.step,
    "h200-parts": speed_tables.parts,
    "h200-step64": speed_tables.step64,
    "h200-cifar10": speed_tables.cifar10,
    "h200-pretrain": speed_tables.pretrain,
    "h200-sampling": speed_tables.sampling,
}


def main(arguments: list[str], root: Path = ROOT, tables: Mapping[str, Table] = TABLES) -> int:
    """Write all tables, or with ``--check`` name the stale ones. Return the exit code."""
    if arguments not in ([], ["--check"]):
        print("usage: python -m tools.tables [--check]", file=sys.stderr)
        return 2
    try:
        if arguments:
            stale = stale_tables(root, tables)
            for place in stale:
                print(f"{place} differs from its files in results/: run make tables", file=sys.stderr)
            return 1 if stale else 0
        for page, text in changed_pages(root, tables):
            with atomic_write(page) as scratch:
                scratch.write_text(text, encoding="utf-8")
            print(f"wrote {page.relative_to(root)}")
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def stale_tables(root: Path, tables: Mapping[str, Table]) -> list[str]:
    """Return "PAGE: table 'NAME'" for each block that is not what its files say."""
    results, stale = Results(root / "results"), []
    for page, text in _marked(root, tables):
        for block in BLOCK.finditer(text):
            if block["body"] != _body(tables[block["name"]](results)):
                stale.append(f"{page.relative_to(root)}: table {block['name']!r}")
    return stale


def changed_pages(root: Path, tables: Mapping[str, Table]) -> Iterator[tuple[Path, str]]:
    """Yield each page whose tables change, with its new text."""
    results = Results(root / "results")

    def fresh(block: re.Match[str]) -> str:
        name = block["name"]
        return f"<!-- table: {name} -->\n{_body(tables[name](results))}<!-- end -->"

    for page, text in _marked(root, tables):
        new = BLOCK.sub(fresh, text)
        if new != text:
            yield page, new


def _marked(root: Path, tables: Mapping[str, Table]) -> list[tuple[Path, str]]:
    """Return the pages with tables and their texts. Raise if a marker or a description has no counterpart."""
    used: set[str] = set()
    marked = []
    for page in sorted(path for pattern in PAGES for path in root.glob(pattern)):
        text, place = page.read_text(encoding="utf-8"), page.relative_to(root)
        names = [block["name"] for block in BLOCK.finditer(text)]
        if len(MARKER.findall(text)) != 2 * len(names):
            raise InputError(f"{place}: each <!-- table: NAME --> needs an <!-- end --> after it")
        for name in names:
            if name not in tables:
                raise unknown_name(f"{place}: table", name, tables)
        used.update(names)
        if names:
            marked.append((page, text))
    if unused := sorted(tables.keys() - used):
        raise InputError(f"table {unused[0]!r} is in no page: mark its place or remove its description")
    return marked


def _body(table: str) -> str:
    # Blank lines on both sides: some renderers see no table next to a comment.
    return f"\n{table.strip()}\n\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
