"""The page in a browser: quiet, self-contained, readable at any width, and working as described."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import report_cases as cases

from troll.lab.report import write_report

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def without(reason: str) -> None:
    """No browser: skipped at home, a failure where the tests must be complete."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="module")
def browser() -> Iterator:
    try:
        from playwright.sync_api import Error, sync_playwright
    except ImportError:
        without("playwright is not installed: pip install playwright")
    executable = next(filter(None, map(shutil.which, NAMES)), None)
    with sync_playwright() as playwright:
        try:
            opened = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        except Error as error:
            without(f"no Chromium: install chromium, or run `playwright install chromium` ({error})")
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = cases.write_run(tmp_path_factory.mktemp("runs") / "arithmetic-troll")
    cases.write_evaluation(folder)
    return write_report(folder, figures=False)


@pytest.fixture(scope="module")
def comparison(tmp_path_factory) -> Path:
    folder = cases.write_comparison(tmp_path_factory.mktemp("runs") / "compare", updates=24)
    return write_report(folder, figures=False)


class Opened:
    """A page, and everything it did that it should not."""

    def __init__(self, browser, path: Path, width: int = 1280, **options) -> None:
        self.page = browser.new_page(viewport={"width": width, "height": 900}, **options)
        self.noise: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.noise.append(message.text))
        self.page.on("pageerror", lambda error: self.noise.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.noise.append(dialog.message), dialog.dismiss()))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_) -> None:
        self.page.close()


@pytest.mark.parametrize("kind", ["run", "comparison"])
@pytest.mark.parametrize("width", [1280, 820, 400, 320])
def test_the_page_is_quiet_complete_and_fits(browser, request, kind, width):
    path = request.getfixturevalue(kind)
    with Opened(browser, path, width) as opened:
        page = opened.page
        assert page.evaluate("document.documentElement.scrollWidth") == width
        figures = page.locator("figure")
        assert figures.count() == (12 if kind == "run" else 6)
        for i in range(figures.count()):
            drawn = [svg.bounding_box() for svg in figures.nth(i).locator("svg").all() if svg.is_visible()]
            assert len(drawn) == 1
            assert drawn[0]["width"] > 200
            assert drawn[0]["height"] > 100
            assert drawn[0]["x"] + drawn[0]["width"] <= width
        sizes = page.evaluate(
            "[...document.querySelectorAll('svg text')].filter(t => t.checkVisibility())"
            ".map(t => parseFloat(getComputedStyle(t).fontSize) * t.ownerSVGElement.getScreenCTM().a)"
        )
        assert min(sizes) >= (11 if width == 1280 else 8)
        assert opened.noise == []
        assert [url for url in opened.requests if not url.startswith("data:")] == [path.as_uri()]


def test_what_a_model_wrote_runs_nothing(browser, run):
    with Opened(browser, run) as opened:
        shown = opened.page.locator(".step:not([hidden]) .t", has_text="<script>")
        assert shown.inner_text() == cases.HOSTILE
        shown.hover()
        assert opened.page.locator("#tip b").inner_text() == cases.HOSTILE
        opened.page.wait_for_timeout(100)
        assert opened.page.locator("img").count() == 0
        assert opened.noise == []


def test_the_policy_of_the_page_stops_scripts_that_are_not_its_own(browser, run, tmp_path):
    broken = tmp_path / "broken.html"
    broken.write_text(
        run.read_text("utf-8").replace("</main>", "<script>document.title = 'taken'</script></main>", 1), "utf-8"
    )
    with Opened(browser, broken) as opened:
        assert opened.page.title() == "arithmetic-troll · TROLL"
        assert "Content Security Policy" in " ".join(opened.noise)


@pytest.mark.parametrize(("scheme", "other"), [("light", "dark"), ("dark", "light")])
def test_light_and_dark_by_preference_and_by_button(browser, run, scheme, other):
    def shades(page) -> tuple[float, float]:
        """Lightness of the background, and of the text in a figure."""
        found = page.evaluate(
            """() => [getComputedStyle(document.body).backgroundColor,
                      getComputedStyle(document.querySelector('#figure-reward svg text')).fill]"""
        )
        back, text = (sum(map(float, colour[4:-1].split(","))) / 765 for colour in found)
        return back, text

    with Opened(browser, run, color_scheme=scheme) as opened:
        for now in (scheme, other, scheme):
            back, text = shades(opened.page)
            assert (back > 0.9 and text < 0.5) if now == "light" else (back < 0.2 and text > 0.5)
            opened.page.locator("#theme").click()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_on_every_level_of_the_scale_is_legible(browser, run, scheme):
    with Opened(browser, run, color_scheme=scheme) as opened:
        ratios = opened.page.evaluate(
            """() => {
              const pixel = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
              const light = (colour) => {
                pixel.clearRect(0, 0, 1, 1); pixel.fillStyle = colour; pixel.fillRect(0, 0, 1, 1);
                const [r, g, b] = [...pixel.getImageData(0, 0, 1, 1).data].map(
                  (c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
                return 0.2126 * r + 0.7152 * g + 0.0722 * b;
              };
              const ink = light(getComputedStyle(document.body).color);
              return [1, 2, 3, 4, 5, 6, 7, 8].map((k) => {
                const back = light(getComputedStyle(document.querySelector(".scale .k" + k)).backgroundColor);
                return (Math.max(ink, back) + 0.05) / (Math.min(ink, back) + 0.05);
              });
            }"""
        )
        assert min(ratios) >= 4.5  # WCAG AA
        assert sorted(ratios, reverse=True) == ratios  # each level stands out more from the page than the one before


def test_pointing_at_a_token_tells_its_numbers(browser, run):
    with Opened(browser, run) as opened:
        page = opened.page
        token = page.locator(".step:not([hidden]) .t.p").first
        said = token.get_attribute("data-tip")
        assert "projected" in said
        token.scroll_into_view_if_needed()
        page.wait_for_timeout(50)
        token.hover()
        tip = page.locator("#tip")
        assert tip.is_visible()
        assert tip.inner_text() == f"{token.inner_text()}\n{said}"
        box = tip.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 1280
        page.locator("h1").hover()
        assert not tip.is_visible()


def test_the_keyboard_moves_from_token_to_token(browser, run):
    with Opened(browser, run) as opened:
        page = opened.page
        completion = page.locator(".step:not([hidden]) .completion").nth(1)
        completion.focus()
        tokens = completion.locator(".t")
        for key in ("ArrowRight", "ArrowRight", "ArrowLeft"):
            page.keyboard.press(key)
        assert page.locator(".t.on").count() == 1
        on = completion.locator(".on")
        assert page.locator("#tip").inner_text().endswith(on.get_attribute("data-tip"))
        before = tokens.evaluate_all("ts => ts.findIndex(t => t.classList.contains('on'))")
        page.keyboard.press("ArrowRight")
        assert tokens.evaluate_all("ts => ts.findIndex(t => t.classList.contains('on'))") == before + 1
        page.keyboard.press("Escape")
        assert not page.locator("#tip").is_visible()


def test_the_slider_chooses_the_update(browser, run):
    with Opened(browser, run) as opened:
        page = opened.page
        steps = page.locator(".step")
        assert steps.count() == 9
        assert steps.last.is_visible()
        assert page.locator(".step:not([hidden])").count() == 1
        page.locator("[data-move='-1']").click()
        assert steps.nth(7).is_visible()
        page.locator(".chooser input").fill("0")
        assert steps.first.is_visible()
        assert page.locator(".chooser output").inner_text() == "Update 1 (update 1 of its rollout)"
        assert page.locator(".step:not([hidden])").count() == 1


def test_without_scripts_everything_is_there(browser, run):
    with Opened(browser, run, java_script_enabled=False) as opened:
        page = opened.page
        assert [step.is_visible() for step in page.locator(".step").all()] == [True] * 9
        assert not page.locator(".chooser").is_visible()
        assert not page.locator("#theme").is_visible()
        assert "KL" in page.locator(".completion .t").first.get_attribute("title")
