"""The documentation matches the code: metrics, reasons of rejections, configuration."""

import re
from pathlib import Path

import yaml
from exposed import everything_exposed
from settingspage import rows, written

from bf16kit.service.config.serverconfig import ServerConfig
from bf16kit.service.models.serving import DEFAULT_MAX_BATCH_SIZE, Serving
from bf16kit.service.request import REFUSALS

DOCS = Path(__file__).parents[2] / "docs"


def documented_metrics() -> dict[str, tuple[str, set[str]]]:
    """Return the type and the labels of every metric in the table of the page, by name."""
    page = (DOCS / "metrics.md").read_text("utf-8")
    found = {}
    for names, types, labels in re.findall(r"^\| (`bf16kit_[^|]+) \| ([^|]+) \| ([^|]*)\|", page, re.MULTILINE):
        kinds = re.findall(r"gauge|counter|histogram", types)
        for at, name in enumerate(re.findall(r"`(\w+)`", names)):
            kind = kinds[min(at, len(kinds) - 1)]
            has_labels = kind == "counter" or "(counter)" not in labels
            of_model = set() if "no model" in labels + types else {"model", "version"}
            found[name] = kind, of_model | (set(re.findall(r"`(\w+)`", labels)) if has_labels else set())
    return found


def test_every_metric_is_documented_with_its_type_and_labels_and_every_documented_metric_exists() -> None:
    text = everything_exposed()
    labels: dict[str, set[str]] = {}
    for name, pairs in re.findall(r"^(bf16kit_\w+)\{(.*)\} \S+$", text, re.MULTILINE):
        labels.setdefault(re.sub(r"_(bucket|sum|count)$", "", name), set()).update(re.findall(r'(\w+)="', pairs))
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    ours = {name: kind for name, kind in types.items() if name.startswith("bf16kit_")}
    assert {name: (kind, labels.get(name, set()) - {"le"}) for name, kind in ours.items()} == documented_metrics()
    page = (DOCS / "metrics.md").read_text("utf-8")
    assert set(re.findall(r"`((?:process|python)_[a-z_]+)`", page)) <= set(types)


def test_every_reason_of_a_rejection_is_documented() -> None:
    page = (DOCS / "metrics.md").read_text("utf-8")
    assert [reason for reason in REFUSALS if reason not in page] == []


def test_the_tables_of_the_configuration_are_those_of_the_code_and_every_key_has_a_sentence() -> None:
    page = (DOCS / "configuration.md").read_text("utf-8")
    assert written(page) == page, "run make docs"
    assert [key for model in (ServerConfig, Serving) for key, field in rows(model) if not field.description] == []


def test_the_serving_yaml_of_the_documentation_is_accepted_and_shows_every_key_with_its_default() -> None:
    page = (DOCS / "configuration.md").read_text("utf-8")
    (example,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    shown = yaml.safe_load(example)
    assert Serving(**shown) == Serving(max_batch_size=DEFAULT_MAX_BATCH_SIZE)
    assert shown.keys() == Serving.model_fields.keys()


def test_every_decision_has_a_status_and_the_index_has_every_decision_with_its_title() -> None:
    index = (DOCS / "decisions" / "README.md").read_text("utf-8")
    pages = {page.name: page.read_text("utf-8") for page in (DOCS / "decisions").glob("0*.md")}
    assert [name for name, text in pages.items() if "\nStatus: " not in text] == []
    titles = {name: text.splitlines()[0].split(" · ")[1] for name, text in pages.items()}
    assert titles == dict(re.findall(r"^\| \[\d{4}\]\((\S+)\) \| (.+?) \|", index, re.MULTILINE))
