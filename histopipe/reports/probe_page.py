"""Report of `probe`: what simple models make of the features of each encoder, and what these know of the site."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from histopipe.evaluation.evaluate import metric_title, with_ends
from histopipe.reports.charts import interval_chart
from histopipe.reports.evaluation_blocks import INTERVALS, difference_cell
from histopipe.reports.html_page import Block, Cell, Page, Table, number
from histopipe.studies.probe import INDEX, OTHER_SITES, SITE, ProbeResult, Score, read_probe

_OF_SITES = {
    OTHER_SITES: "The linear model is trained on other sites than it is tested on. If the interval of its difference from the "
    "linear probe above is below 0, the linear probe has used the site, or learns less from patients of other sites.",
    SITE: "How well a linear model predicts the site, across patients. The better, the easier a model learns the site in place of the class.",
    INDEX: "Of the nearest patches of other patients that share either the class or the site, the share with the same "
    "class, in balanced comparisons of two classes at two sites (after Kömen et al. 2026). The index of noise is that of features "
    "without information on these patients: 0.5, and more if few patients have both classes. Below it, the site is stronger "
    "than the class. The class of a patch is that of its slide.",
}


def probe_page(folder: Path) -> Page:
    """Return the page of a folder of `probe`.

    Raises:
        DamagedStore: the folder cannot be read.
    """
    result = read_probe(folder)
    page = Page(
        f"Encoders {folder.resolve().name}", f"{len(result.sets)} feature sets, in {folder}"
    )
    rows = [
        [
            Cell(name),
            number(values["dimension"]),
            number(values["patches"]),
            number(values["bytes_per_patch"] / 1024, 1),
        ]
        for name, values in result.sets.items()
    ]
    columns = ("features", "dimension", "patches", "kB per patch")
    page.add(
        "Summary",
        Block(
            "text",
            f"{result.items} bags of {result.patients} patients, each the mean of its patches, in the same folds. "
            f"{INTERVALS} Differences are from the first feature set, of the same patients. What ranks patients, such as the AUC, is "
            "formed within the test set of each fold.",
            tone="soft",
        ),
        Table("Feature sets", columns, rows),
        Block("charts", list(_charts(result))),
    )
    page.add("Probes", _table(result, [s for s in result.scores if s.probe not in _OF_SITES]))
    blocks: list[Block | Table] = []
    for probe, text in _OF_SITES.items():
        scores = [score for score in result.scores if score.probe == probe]
        blocks += [Block("text", text), _table(result, scores)] if scores else []
    page.add("Sites", *blocks)
    page.add("Remarks", Block("notes", list(result.notes)))
    return page


def _table(result: ProbeResult, scores: Sequence[Score]) -> Table:
    """Return a table of probes with the same metrics."""
    names = list(scores[0].values)
    titles = [metric_title(name, result.task) for name in names]
    with_p = any(score.p is not None for score in scores)
    with_loss = any(score.less_linear for score in scores)
    return Table(
        scores[0].probe if len({score.probe for score in scores}) == 1 else "",
        (
            *("probe", "features", *titles, f"difference of {titles[0]}"),
            *["minus the linear probe"] * with_loss,
            *["p"] * with_p,
        ),
        [
            [
                Cell(score.probe),
                Cell(score.features),
                *(
                    Cell(with_ends(value, score.intervals.get(name)), value, "n")
                    for name, value in score.values.items()
                ),
                difference_cell(score.differences.get(names[0])),
                *[difference_cell(score.less_linear.get(names[0]))] * with_loss,
                *[number(score.p, 3)] * with_p,
            ]
            for score in scores
        ],
    )


def _charts(result: ProbeResult) -> Iterator[str]:
    """Yield a chart of the main metric of all probes of the targets, and one of the sites."""
    for title, of_sites in (("Probes", False), ("Sites", True)):
        scores = [score for score in result.scores if (score.probe in _OF_SITES) == of_sites]
        series: Mapping[str, dict[str, Any]] = {name: {} for name in result.sets}
        for score in scores:
            main = next(iter(score.values))
            series[score.features][score.probe] = (score.values[main], score.intervals.get(main))
        if scores:
            main = metric_title(next(iter(scores[0].values)), result.task)
            yield interval_chart(title, series, y=f"{main}, or index" if of_sites else main)
