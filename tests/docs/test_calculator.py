"""
# The calculator and the ladder's tables: numbers of the formulas, as a browser shows them
"""

from itertools import product
from math import inf, isclose, nan

import pytest

pytest.importorskip("markdown_it", reason="the libraries of the site are not installed")
pytest.importorskip("selenium", reason="selenium is not installed")

from selenium.webdriver.support.ui import WebDriverWait

from docs import build, calculator, ladder, rungs
from tests.docs.test_site import PHONE, WIDE, chromium, find, look  # noqa: F401  (a fixture)
from zero3.estimate.formulas import CHOICES, WIDTHS, number


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The calculator's page alone, without the runs that other pages need."""
    out = tmp_path_factory.mktemp("calculator")
    for pattern in build.STYLES:
        for path in build.ROOT.glob(pattern):
            (out / path.name).write_text(path.read_text())
    text = (build.ROOT / "docs/calculator.md").read_text()
    text = text.replace("{{calculator.table}}", calculator.table())
    (out / "calculator.html").write_text(
        '<!doctype html><html lang="en"><meta name="viewport" content="width=device-width">'
        '<link rel="stylesheet" href="book.css"><link rel="stylesheet" href="tape.css"><body>'
        f'<main><div class="text">{text}</div></main>')
    return (out / "calculator.html").as_uri()


@pytest.fixture
def browser(chromium):  # noqa: F811
    """The browser of the site's tests; a script that fails is told in its log."""
    yield chromium
    assert [entry for entry in chromium.get_log("browser") if entry["level"] == "SEVERE"] == []


def visit(browser, address):
    """Load the page, and not only another `#` of the page that is there."""
    browser.get("about:blank")
    browser.get(address)
    # A busy machine may answer before the new page's script has run.
    WebDriverWait(browser, 20).until(
        lambda now: now.execute_script("return window.calculator !== undefined"))


def type_into(browser, name, text):
    field = find(browser, f"#calc-{name}")
    field.clear()
    field.send_keys(text)


def bars(browser):
    """The bytes of all bars, as they are written beside them"""
    return browser.execute_script(
        "return [...document.querySelectorAll('.calc-sum')].map((bar) => bar.innerText)")


# ---------------------------------------------------------------------------------------- numbers


def test_the_script_and_the_formulas_have_the_same_numbers(page, browser):
    """
    For five models, six numbers of ranks, two depths, all precisions, all choices of tiers, and
    activations in each tier, each number of each row is equal up to rounding. Breaks if a formula
    changes in one place only.
    """
    questions = [
        calculator.Question(params, ranks, layers, str(basis), *tiers, *saved)
        for params, ranks, layers, basis, tiers, saved in product(
            (1, 125e6, 1.3e9, 8e9, 70e9), (1, 2, 3, 64, 1000, 10**6), (1, 81), WIDTHS, CHOICES,
            ((2048, 0, "device"), (1, 1, "cpu"), (8192, 7, "nvme")))]
    look(browser, WIDE)
    visit(browser, page)
    answers = browser.execute_script("return arguments[0].map(calculator.compute)",
                                     [vars(q) for q in questions])
    assert len(questions) == len(answers) == 3 * 1440
    for q, rows in zip(questions, answers, strict=True):
        for mine, its in zip(calculator.compute(q), rows, strict=True):
            numbers, others = flat(vars(mine)), flat(its)
            assert numbers.keys() == others.keys()
            assert all(isclose(number, others[path], rel_tol=1e-12, abs_tol=1e-12)
                       for path, number in numbers.items()), (q, numbers, others)
            assert mine.name == its["name"]


def flat(row, prefix=""):
    """All numbers of a row, by the path to each"""
    found = {}
    for key, value in row.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        elif not isinstance(value, str):
            found[prefix + key] = value
    return found


def test_the_script_reads_numbers_as_the_command_line_does(page, browser):
    """
    With each unit, with exponents, with spaces; and it refuses what the command line refuses, also
    what is less than nothing or not finite. Breaks if the browser's own reading is taken, which
    makes 16 of 0x10 and 0 of nothing.
    Proves `number`.
    """
    texts = ["8b", "350m", "80GB", "1TB", "7.5e9", "1t", "12", " 8 b ", "1_000", ".5k", "5.", "+3",
             "1e3k", "", " ", "b", "gb", "x", "nan", "inf", "-1", "-8b", "1e999", "0x10", "1,5",
             "8bb", "8 8", "1e", "1__0", "_1", "1_", "--1", "9" * 400]
    look(browser, WIDE)
    visit(browser, page)
    got = browser.execute_script("return arguments[0].map((text) => calculator.number(text))",
                                 texts)
    for text, its in zip(texts, got, strict=True):
        try:
            mine = number(text)
        except ValueError:
            mine = nan
        assert its == (mine if 0 <= mine < inf else None), text


def test_the_page_without_javascript_has_the_example(page):
    """
    8 billion parameters on 64 ranks: 128 GB in data parallel training, 3.5 with ZeRO-3, and half of
    that with the optimizer states in CPU memory. Breaks if the table counts another stage.
    """
    table = calculator.table()
    cells = [row.split("</td>") for row in table.split("<tr>")[2:]]
    numbers = [[cell.rpartition(">")[2] for cell in row] for row in cells]
    assert [row[:2] for row in numbers] == [
        ["data parallel", "128.00"], ["ZeRO-1", "33.50"], ["ZeRO-2", "18.25"], ["ZeRO-3", "3.50"],
        ["ZeRO-3 with offload", "1.75"]]
    assert numbers[4][2:5] == ["1.75", "0.00", "47.25"]


# ----------------------------------------------------------------------------------------- typing


def test_bars_and_answer_follow_what_is_typed(page, browser):
    """
    Each field and each button changes the bars, and their lengths are those of the bytes. Breaks if
    a field is not read, or if a bar is drawn on a scale of its own.
    """
    look(browser, WIDE)
    visit(browser, page + "#offload=device-cpu")
    seen = [bars(browser)]
    assert seen[0] == ["128 GB", "33.5 GB", "18.3 GB", "3.5 GB", "1.75 GB", "1.75 GB"]
    assert "On 64 ranks, ZeRO-3 with offload needs 1.75 GB" in find(browser, ".calc-says").text
    for name, text in (("model", "70b"), ("ranks", "512"), ("layers", "80")):
        type_into(browser, name, text)
        seen.append(bars(browser))
        assert seen[-1] != seen[-2], name
    for name, value in (("precision", "fp32"), ("offload", "nvme-nvme")):
        find(browser, f"#calc-{name} option[value={value}]").click()
        seen.append(bars(browser))
        assert seen[-1] != seen[-2], name
    assert "files" in find(browser, ".calc-bars").text
    find(browser, ".calc-presets button").click()
    assert bars(browser) != seen[-1]
    assert find(browser, "#calc-layers").get_attribute("value") == "12"
    widths = browser.execute_script("""
        return [...document.querySelectorAll('.calc-track')].map((track) =>
            [...track.querySelectorAll('i')].reduce((sum, box) =>
                sum + box.getBoundingClientRect().width, 0) / track.clientWidth);
    """)
    assert widths[0] == pytest.approx(1, abs=0.01)
    assert widths[1] == pytest.approx((8 + 8 / 512) / 16, abs=0.02)


def test_activations_are_in_the_bars_and_may_leave(page, browser):
    """
    One sequence of 2,048 tokens, through 32 blocks with 4,564 features: 36.1 GB beside the model
    states. In files only two blocks' are in memory, of the last row alone. Breaks if the other rows
    lose theirs, or if the row of offload does not appear.
    """
    look(browser, WIDE)
    visit(browser, page)
    type_into(browser, "batch", "1")
    assert bars(browser) == ["164 GB", "69.6 GB", "54.4 GB", "39.6 GB"]
    said = find(browser, ".calc-says").text
    assert ("needs 39.6 GB on each device: 2 GB of model states, 1.5 GB of working buffers and "
            "36.1 GB of activations. That fits a GPU with 80 GB.") in said
    find(browser, "#calc-activations option[value=nvme]").click()
    assert bars(browser) == ["164 GB", "69.6 GB", "54.4 GB", "39.6 GB", "5.75 GB", "36.1 GB"]
    said = find(browser, ".calc-says").text
    assert "It also needs 36.1 GB in files." in said and "2.25 GB of activations" in said
    cells = [cell.text for cell in browser.find_elements("css selector", ".calc-traffic td")]
    assert cells[-4:] == ["23.6 billion", "47.3 GB", "0", "71 GB"]


def test_without_offload_there_are_four_rows(page, browser):
    """
    The last row would repeat ZeRO-3, and the answer is then about ZeRO-3. The page begins with it.
    Breaks if nothing counts as an offload.
    """
    look(browser, WIDE)
    visit(browser, page)
    assert len(browser.find_elements("css selector", ".calc-row")) == 4
    assert "ZeRO-3 needs 3.5 GB on each device" in find(browser, ".calc-says").text
    assert find(browser, "#calc-model").get_attribute("value") == "8b"


@pytest.mark.parametrize("name, text, expected", [
    ("model", "eight", "a number of parameters from 1 up, such as 8b, 350m or 7.5e9. Got: eight."),
    ("ranks", "0.5", "a whole number from 1 up, such as 64. Got: 0.5."),
    ("layers", "0", "a whole number from 1 up, such as 32. Got: 0."),
    ("gpu", "-80", "a number of bytes, such as 80GB. Got: -80."),
    ("gpu", "80GiB", "a number of bytes, such as 80GB. Got: 80GiB. Units are powers of 1000: GB is "
                     "read, GiB is not."),
    ("ranks", "1,00", "a whole number from 1 up, such as 64. Got: 1,00. Write 7.5b, not 7,5b: "
                      "commas only group digits of whole numbers, as in 8,000,000,000."),
    ("gpu", " ", "a number of bytes, such as 80GB. Got: nothing."),
    ("sequence", "0", "a whole number from 1 up, such as 2048. Got: 0."),
    ("batch", "0.5", "a whole number from 0 up, such as 4. Got: 0.5."),
])
def test_bad_input_is_told_what_is_expected(name, text, expected, page, browser):
    """
    Below the fields, of which the bad one is marked; the answer says so, the bars are dimmed, and
    with good input the message goes. Breaks if a NaN reaches the bars.
    """
    look(browser, WIDE)
    visit(browser, page + "#model=8b")
    before, good = bars(browser), find(browser, f"#calc-{name}").get_attribute("value")
    type_into(browser, name, text)
    assert find(browser, f"#calc-{name}-note").text.endswith(f": expected {expected}")
    assert find(browser, f"#calc-{name}").get_attribute("aria-invalid") == "true"
    assert "last input" in find(browser, ".calc-says").text
    assert len(browser.find_elements("css selector", ".calc-stale")) == 2
    type_into(browser, name, good)
    assert find(browser, f"#calc-{name}-note").text == "" and bars(browser) == before
    assert "last input" not in find(browser, ".calc-says").text
    assert not browser.find_elements("css selector", ".calc-stale")


def test_the_address_has_what_the_bars_show(page, browser):
    """
    With bad input these are the last texts that could be read, here the beginning of 7,5b. Breaks
    if the fields are read when the address is written.
    """
    look(browser, WIDE)
    visit(browser, page)
    browser.set_script_timeout(5)
    browser.execute_async_script("""
        const [done] = arguments, field = document.getElementById('calc-model');
        for (const text of ['7', '7,', '7,5', '7,5b']) {
            field.value = text;
            field.dispatchEvent(new Event('input'));
        }
        setTimeout(done, 400);
    """)
    shown = bars(browser)
    assert "#model=7&" in browser.current_url
    assert find(browser, ".calc-bars").get_attribute("class") == "calc-bars calc-stale"
    visit(browser, browser.current_url)
    assert bars(browser) == shown


@pytest.mark.parametrize("text, value", [
    ("8,000,000,000", 8e9), ("1,000", 1000), (" 12,345 ", 12345), ("8b", 8e9), ("7,5", None),
    ("7,5b", None), ("7,125b", None), ("0,125", None), ("80,00", None), ("1,0000", None),
    ("1,000.5", None), (",100", None), ("1,,000", None)])
def test_commas_group_the_digits_of_whole_numbers(text, value, page, browser):
    """
    In groups of three and without a unit, because 7,125b could mean 7.125b too. Breaks if every
    comma is dropped, which makes 75 billion of 7,5b.
    """
    if not browser.current_url.startswith(page):
        visit(browser, page)
    problems, params = browser.execute_script("""
        const { problems, q } = calculator.read({ model: arguments[0], layers: '1', ranks: '1',
            gpu: '80GB', precision: '16', offload: 'device-cpu', sequence: '1', batch: '0',
            activations: 'device' });
        return [Object.keys(problems), q.params];
    """, text)
    assert (problems, params) == ((["model"], None) if value is None else ([], value))


def test_one_part_is_not_listed(page, browser):
    """All of it is working buffers. Breaks if the same bytes are told twice."""
    look(browser, WIDE)
    visit(browser, page + "#offload=nvme-nvme")
    said = find(browser, ".calc-says").text
    assert "1.5 GB on each device, all of it working buffers." in said
    assert said.count("1.5 GB") == 1


def test_the_address_keeps_the_input(page, browser):
    """
    What is typed is in the address, and an address opens with its input. An address of a heading
    changes nothing, and a choice that does not exist is ignored. Breaks if the address is written
    but not read.
    """
    look(browser, WIDE)
    visit(browser, page + "#model=1.3b&ranks=8&precision=20&offload=cpu-tape&batch=3&"
          "activations=nvme")
    value = {name: find(browser, f"#calc-{name}").get_attribute("value")
             for name in ("model", "layers", "ranks", "precision", "offload", "gpu", "sequence",
                          "batch", "activations")}
    assert value == {"model": "1.3b", "layers": "32", "ranks": "8", "precision": "20",
                     "offload": "device-device", "gpu": "80GB", "sequence": "2048", "batch": "3",
                     "activations": "nvme"}
    type_into(browser, "ranks", "16")
    browser.set_script_timeout(5)
    browser.execute_async_script("setTimeout(arguments[0], 400)")
    address = browser.current_url
    assert "model=1.3b" in address and "ranks=16" in address
    before = bars(browser)
    browser.execute_script("location.hash = '#what-the-parts-are'")
    assert bars(browser) == before
    visit(browser, address)
    assert bars(browser) == before


# ------------------------------------------------------------------------------------- appearance


CONTRAST = """
    const luminance = (rgb) => rgb.map((c) => c / 255).map((c) =>
        c <= .03928 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4)
        .reduce((sum, c, i) => sum + c * [.2126, .7152, .0722][i], 0);
    const rgba = (text) => text.match(/[\\d.]+/g).map(Number);
    const ground = (node) => {
        for (; node; node = node.parentElement) {
            const color = rgba(getComputedStyle(node).backgroundColor);
            if (color.length === 3 || color[3] === 1) return color.slice(0, 3);
        }
        return [255, 255, 255];
    };
    const lowest = [];
    for (const node of document.querySelectorAll('#calculator *')) {
        const own = [...node.childNodes].some((it) => it.nodeType === 3 && it.data.trim());
        if (!own && !node.matches('input')) continue;
        const [a, b] = [rgba(getComputedStyle(node).color).slice(0, 3), ground(node)]
            .map(luminance).sort((x, y) => y - x);
        if ((a + .05) / (b + .05) < 4.5) lowest.push([node.outerHTML, (a + .05) / (b + .05)]);
    }
    const page = document.documentElement;
    return [page.scrollWidth - page.clientWidth, lowest,
        [...document.querySelectorAll('#calculator table')].map((it) =>
            it.scrollWidth - it.clientWidth)];
"""


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
def test_the_calculator_fits_its_window_and_can_be_read(size, theme, page, browser):
    """
    Nothing is wider than the window, no table has to be scrolled, and all text has a contrast of at
    least 4.5, with a message about bad input too. Breaks if text has a colour of the bars.
    """
    look(browser, size, theme)
    visit(browser, page + "#model=70b&ranks=3&offload=nvme-nvme&layers=x&batch=4&activations=cpu")
    assert find(browser, "#calc-layers-note").is_displayed()
    assert find(browser, ".calc-says").text == "Correct the marked input first."
    assert browser.execute_script(CONTRAST) == [0, [], []]
    type_into(browser, "layers", "80")
    assert browser.execute_script(CONTRAST) == [0, [], [0]]


@pytest.mark.parametrize("size", [(1400, 900), (390, 800)], ids=["wide", "phone"])
def test_the_ladders_tables_and_figures_fit_into_the_text(size, browser, tmp_path):
    """
    With numbers as wide as those of a run, no table is wider than the column, so nothing juts out
    and nothing has to be scrolled. Breaks with a column for each of the five steps.
    """
    numbers = {"device_rest_bytes": 2448424, "device_peak_bytes": 2891560, "cpu_bytes": 2448424,
               "file_bytes": 2523136, "sent_bytes": 1802832, "losses": [5.57553] * 5,
               "loss_difference": 5e-07, "weight_difference": 1e-07,
               "sharded": ladder.Zero3.sharded}
    answer = {"params": 306048, "ranks": 2, "steps": 5, "layers": 10,
              "rows": [{"rung": name, **numbers} for name in ladder.rungs(f"{tmp_path}")]}
    parts = [rungs.rung_figures(answer, "origin"), *(write(answer) for write in (
        rungs.memory_table, rungs.traffic_table, rungs.losses_table, rungs.differences_table))]
    (tmp_path / "page.html").write_text(
        '<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<style>{(build.ROOT / 'docs/book.css').read_text()}</style>"
        f'<div class="text">{"".join(parts)}</div>')
    look(browser, size)
    browser.get((tmp_path / "page.html").as_uri())
    over = browser.execute_script("""
        const column = document.querySelector('.text').getBoundingClientRect();
        return [...document.querySelectorAll('table, svg')].filter((it) => it.checkVisibility())
            .map((it) => [it.scrollWidth - it.clientWidth,
                          it.getBoundingClientRect().right <= column.right]);
    """)
    assert over == [[0, True]] * 6
