"""The application in a real, headless Chromium: what a person would do with it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from groupwise.viewer.report import export

pytestmark = pytest.mark.timeout(240)

Tab = Callable[..., Any]


def settled(page: Any, view: str = "groups") -> None:
    page.wait_for_selector(f'main[data-ready="{view}"]')


def until(page: Any, condition: str) -> None:
    """Wait for an expression to be true.  Playwright's own way evaluates text inside the page, which the page's policy forbids."""
    for _ in range(400):
        if page.evaluate(f"() => {{ try {{ return Boolean({condition}); }} catch {{ return false; }} }}"):
            return
        page.wait_for_timeout(50)
    raise AssertionError(condition)


def cards(page: Any) -> list[float]:
    page.wait_for_selector(".card")
    return [float(text.replace("−", "-")) for text in page.locator(".card .reward").all_inner_texts()]


def colours(page: Any) -> list[str]:
    return page.eval_on_selector_all(".card .t", "all => all.map((one) => one.style.backgroundColor)")


def test_it_opens_on_the_most_informative_group_the_best_first(viewer: Callable, run_folder: Path, tab: Tab) -> None:
    own = viewer(run_folder)
    page = tab(own.address)
    shown = own.pages.answer("step", {"run": "0"})["groups"][0]
    assert page.locator(".steps h1").inner_text().startswith("Step 40")
    assert page.locator(".group-head h2").inner_text() == f"Group {shown['group']}"
    completions = own.pages.answer("group", {"run": "0", "step": "40", "group": str(shown["group"])})["completions"]
    different = {(one["reward"], *one["ids"]) for one in completions}
    assert cards(page) == sorted((reward for reward, *_ in different), reverse=True)
    assert page.locator(".figure").count() >= 4
    assert page.locator(".group-list li").count() == 3
    assert page.title() == "alpha · groupwise"
    shares = page.evaluate("[0.125, 0.375, 0.0125, 0.05, 0, 1, null].map(percent)")
    assert shares == [*(f"{share:.0%}" for share in (0.125, 0.375)), "1.2%", "5.0%", "0%", "100%", "–"]


def test_tokens_are_coloured_by_the_key_that_is_pressed(viewer: Callable, run_folder: Path, tab: Tab) -> None:
    page = tab(viewer(run_folder).address)
    seen = []
    for key, label in zip("1234567", ("Push", "Log-prob", "Entropy", "KL", "Mismatch", "Gradient", "Version"), strict=True):
        page.keyboard.press(key)
        assert page.locator('.quantities button[aria-pressed="true"]').first.inner_text().endswith(label)
        assert page.locator(".scale .bar").is_visible()
        seen.append(tuple(colours(page)))
    assert len(set(seen)) == 7
    assert all(any(colour) for colour in seen[:6])
    page.keyboard.press("0")
    assert not any(colours(page))


@pytest.mark.slow
def test_the_colour_says_the_sign_and_clipped_tokens_are_hatched(viewer: Callable, run_folder: Path, tab: Tab) -> None:
    own = viewer(run_folder)
    page = tab(own.address + "#step=7&group=1&by=push")
    group = own.pages.answer("group", {"run": "0", "step": "7", "group": "1"})
    for completion in group["completions"]:
        spans = page.locator(f"#c{completion['index']} .t")
        found = spans.evaluate_all("all => all.map((one) => [one.style.backgroundColor, getComputedStyle(one).backgroundImage])")
        for (colour, image), push, clipped in zip(
            found, completion["columns"]["push"], completion["columns"]["clipped"], strict=True
        ):
            if abs(push) > 0.05:
                assert colour.startswith("rgba(37, 99, 235" if push > 0 else "rgba(234, 88, 12"), (colour, push)
            assert ("repeating" in image) == (clipped > 0)


@pytest.mark.slow
def test_the_number_of_a_token_is_under_the_cursor_and_under_the_arrow_keys(viewer: Callable, run_folder: Path, tab: Tab) -> None:
    own = viewer(run_folder)
    page = tab(own.address + "#step=7&group=1&by=entropy")
    completion = own.pages.answer("group", {"run": "0", "step": "7", "group": "1"})["completions"][0]
    page.locator("#c0 .t").nth(2).hover()
    tip = page.locator("#tip")
    assert tip.locator("tr.chosen").inner_text().split() == ["Entropy", f"{completion['columns']['entropy'][2]:.3f}"]
    assert f"id {completion['ids'][2]}" in tip.inner_text()
    page.locator("#c0 .text").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert f"token 1 · id {completion['ids'][1]}" in tip.inner_text()
    page.keyboard.press("Escape")
    assert tip.is_hidden()


@pytest.mark.slow
def test_blanks_and_special_tokens_on_demand(viewer: Callable, run_folder: Path, tab: Tab) -> None:
    page = tab(viewer(run_folder).address)
    text = lambda: page.locator(".card .text").first.inner_text()  # noqa: E731
    assert "therefore 7" in text()
    assert "<|end|>" not in text()
    page.keyboard.press("w")
    page.wait_for_selector("text=<|end|>")
    assert "therefore·7" in text()


@pytest.mark.slow
def test_steps_and_groups_by_keyboard_and_the_address_follows(viewer: Callable, run_folder: Path, tab: Tab) -> None:
    own = viewer(run_folder)
    page = tab(own.address)
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector(".steps h1 >> text=Step 39")
    first = page.locator(".group-head h2").inner_text()
    page.keyboard.press("ArrowDown")
    until(page, f"document.querySelector('.group-head h2').innerText !== {json.dumps(first)}")
    page.keyboard.press("3")
    address = page.url
    assert "step=39" in address
    assert "by=entropy" in address
    again = tab(address)
    assert again.locator(".group-head h2").inner_text() == page.locator(".group-head h2").inner_text()
    assert again.locator('.quantities button[aria-pressed="true"]').first.inner_text().endswith("Entropy")
    page.go_back()
    page.wait_for_selector(f".group-head h2 >> text={first}")
    page.keyboard.press("f")
    page.wait_for_selector(".steps h1 >> text=Step 40")
    for key, view in (("c", "curves"), ("l", "lenses"), ("i", "config"), ("d", "compare"), ("/", "search")):
        page.keyboard.press(key)
        settled(page, view)
    assert page.evaluate("document.activeElement.id") == "search-text"
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    assert page.locator("dialog").is_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("g")
    settled(page)


@pytest.mark.slow
def test_everything_can_be_reached_with_tab_alone(viewer: Callable, run_folder: Path, tab: Tab) -> None:
    page = tab(viewer(run_folder).address)
    page.wait_for_selector(".card")
    reached = set()
    for _ in range(90):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate(
                "(document.activeElement.closest('nav') && 'nav')"
                " || document.activeElement.closest('[class]')?.className.split(' ')[0]"
            )
        )
    assert {"skip", "nav", "icon", "prompt-text", "text", "figure"} <= reached, reached
    assert page.locator(".group-list a").first.evaluate("one => { one.focus(); return document.activeElement === one; }")


@pytest.mark.slow
def test_search_filters_and_its_link_reproduces_it(viewer: Callable, run_folder: Path, tab: Tab) -> None:
    page = tab(viewer(run_folder).address + "#view=search")
    page.fill('input[name="text"]', "therefore 777")
    page.fill('input[name="first"]', "30")
    page.locator('input[name="low"]').fill("1.5")
    page.get_by_role("button", name="Search").click()
    until(page, "document.querySelector('.found li') && location.hash.includes('first=30')")
    until(page, "document.querySelector('[role=status].hint').innerText.includes('that is all')")
    found = page.locator(".found li").all_text_contents()  # rows out of sight have no inner text
    assert found
    assert all("therefore 777" in row and int(re.search(r"step (\d+)", row)[1]) >= 30 for row in found)
    assert page.locator(".found mark").first.inner_text() == "therefore 777"
    again = tab(page.url)
    until(again, "document.querySelector('[role=status].hint').innerText.includes('that is all')")
    assert again.locator(".found li").all_text_contents() == found
    again.locator(".found a").first.click()
    settled(again)
    again.wait_for_selector(".card.linked")


@pytest.mark.slow
def test_two_runs_are_compared_on_the_same_prompts(viewer: Callable, run_folder: Path, other_folder: Path, tab: Tab) -> None:
    page = tab(viewer(run_folder, other_folder).address + "#view=compare&step=5&other=1&with=5")
    page.wait_for_selector("#cl0")
    page.wait_for_selector("#cr0")
    prompts = page.locator(".prompt-text").all_inner_texts()
    assert len(prompts) == 2
    assert prompts[0] == prompts[1]
    assert [text.split(",")[0] for text in page.locator(".side-title").all_inner_texts()] == ["alpha", "beta"]
    page.wait_for_selector("table.config")
    rows = page.locator("table.config tbody tr").all_inner_texts()
    assert [row.split()[0] for row in rows] == ["group.beta", "steps"]
    before = colours(page)
    page.keyboard.press("2")
    assert colours(page) != before


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 1])
def test_compare_begins_with_a_run_that_sampled(
    viewer: Callable, run_folder: Path, other_folder: Path, tab: Tab, tmp_path: Path, place: int
) -> None:
    """Before them, as in a folder of stages, or between them lies an SFT run, which has no completions."""
    (tmp_path / "sft").mkdir()
    (tmp_path / "sft" / "config.yaml").write_text("objective: sft\n", encoding="utf-8")
    (tmp_path / "sft" / "metrics.jsonl").write_text('{"step": 1, "wall": 1.0, "loss": 2.0}\n', encoding="utf-8")
    folders = [run_folder, other_folder]
    folders.insert(place, tmp_path / "sft")
    page = tab(viewer(*folders).address + "#view=compare")
    page.wait_for_selector("#cr0")
    assert [text.split(",")[0] for text in page.locator(".side-title").all_inner_texts()] == ["alpha", "beta"]


@pytest.mark.slow
def test_curves_lie_over_each_other_by_step_tokens_and_time(
    viewer: Callable, run_folder: Path, other_folder: Path, tab: Tab
) -> None:
    page = tab(viewer(run_folder, other_folder).address + "#view=curves&metric=rew")
    page.wait_for_selector(".chart .uplot canvas")
    assert page.locator(".chart").first.get_attribute("aria-label") == "reward"
    assert page.locator(".chart .last").first.inner_text().count("·") == 1, "two runs"
    for axis in ("tokens", "time"):
        page.locator("select").last.select_option(axis)
        until(page, f"location.hash.includes('x={axis}')")
        page.wait_for_selector(".chart .uplot canvas")
    over = page.locator(".chart .u-over").first.bounding_box()
    page.mouse.click(over["x"] + over["width"] / 2, over["y"] + 40)
    settled(page)
    assert "step=" in page.url


@pytest.mark.slow
def test_axes_have_whole_steps_and_a_range_that_fits(viewer: Callable, run_folder: Path, tab: Tab) -> None:
    page = tab(viewer(run_folder).address)
    settled(page)
    code = """async (ys) => {
        const place = document.body.appendChild(document.createElement("div"));
        const plot = chart(place, [{ name: "a", xs: [0, 7, 14], ys, colour: "#000000" }], { label: "a" });
        await new Promise((done) => setTimeout(done, 50));
        return [plot.axes[0]._values.filter(Boolean), plot.axes[1]._values.filter(Boolean)];
    }"""
    steps, zero = page.evaluate(code, [0, 0, 0])
    assert all(label.isdecimal() for label in steps) and (zero[0], zero[-1]) == ("0", "1")
    _, tiny = page.evaluate(code, [2e-13, 3e-13, 4e-13])
    assert len({*tiny}) == len(tiny) > 1
    _, same = page.evaluate(code, [5, 5, 5])
    assert float(same[0]) < 6 and float(same[-1]) > 4 and len(same) > 1


@pytest.mark.slow
def test_lenses_lead_to_the_completions(viewer: Callable, run_folder: Path, tab: Tab) -> None:
    page = tab(viewer(run_folder).address + "#view=lenses")
    page.wait_for_selector("canvas.scatter")
    page.locator(".links a").first.click()
    page.wait_for_selector(".card.linked")


@pytest.mark.slow
def test_it_follows_a_live_run(viewer: Callable, made: Any, tmp_path: Path, tab: Tab) -> None:
    folder = made.make_run(tmp_path / "going", 3)
    (folder / "done.json").unlink()
    (folder / ".lock").write_text(json.dumps({"pid": os.getpid(), "host": os.uname().nodename}))
    page = tab(viewer(folder).address)
    assert page.locator(".state.live").inner_text() == "live · step 3 of 40"
    made.add_step(folder, 4)
    page.wait_for_selector(".steps h1 >> text=Step 4", timeout=20_000)
    assert page.locator(".state").inner_text() == "live · step 4 of 40"
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector(".steps h1 >> text=Step 3")
    made.add_step(folder, 5)
    page.wait_for_selector(".state >> text=step 5", timeout=20_000)
    assert page.locator(".steps h1 b").inner_text() == "3", "who looks at a step is not taken away from it"


@pytest.mark.slow
def test_held_out_completions_stand_beside_those_of_training(viewer: Callable, run_folder: Path, tab: Tab) -> None:
    page = tab(viewer(run_folder).address)
    page.keyboard.press("e")
    page.wait_for_selector(".steps h1 >> text=Held out, after step 40")
    assert cards(page)


@pytest.mark.slow
def test_episodes_are_turns_with_their_tools_and_their_time(viewer: Callable, made: Any, tmp_path: Path, tab: Tab) -> None:
    page = tab(viewer(made.make_episodes(tmp_path / "episodes")).address)
    page.wait_for_selector("#c0 .turn")
    assert page.locator("#c0 .turn.own > summary b").all_inner_texts() == ["turn 1", "turn 2"]
    assert page.locator("#c0 .turn.own > .said").all_inner_texts() == ["call add and divide", "the answer is 4"]
    assert page.locator("#c0 .turn.observed .said").inner_text() == "[4]"
    assert page.locator("#c0 .turn.observed .t.untrained").count() == 3
    calls = page.locator("#c0 .call").all_inner_texts()
    assert ["add" in calls[0], '"b": 2' in calls[0], "250 ms" in calls[0]] == [True] * 3
    assert "exception" in calls[1]
    widths = page.locator("#c0 .took .bar span").evaluate_all("all => all.map((one) => one.style.width)")
    assert widths == ["25%", "50%", "25%"], "two calls, and what is left of the second"
    assert "cut to the limit" in page.locator("#c0 .turn.observed").inner_text()
    late = page.locator("#c1").inner_text()
    assert "out of time" in late
    assert "drawn behind 11 tokens of its own" in late
    page.keyboard.press("1")
    assert any(colours(page))
    written = page.locator("#c0 .t.untrained").evaluate_all("all => all.map((one) => one.style.backgroundColor)")
    assert not any(written), "nothing pushes what the policy did not write"
    page.locator("#c0 .turn.own > summary").first.click()
    page.locator("#c0 .text").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#c0 .turn.own").first.evaluate("one => one.open"), "the fold of the token that the keys go to opens"


@pytest.mark.slow
def test_an_agents_episode_can_be_read_to_its_end(viewer: Callable, made: Any, tmp_path: Path, tab: Tab) -> None:
    page = tab(viewer(made.make_agents(tmp_path / "agents", texts=[made.HOSTILE[0]])).address)
    page.wait_for_selector("#c0 .turn")
    summaries = page.locator("#c0 .turn.own > summary").all_inner_texts()
    assert ["side conversation, not trained" in one for one in summaries] == [True, False, False]
    assert ["without web_search" in one for one in summaries] == [False, True, False]
    assert ["another conversation: drawn behind" in one for one in summaries] == [True, True, False]
    assert ["agent 2" in one for one in summaries] == [False, False, True]
    page.locator("#c0 .turn.own > .turn.observed > summary").first.click()
    assert page.locator("#c0 .turn.own > .turn.observed .said").first.inner_text() == "Name it."
    assert page.locator("#c0 .turn.own .said .t.untrained").count() == len("A title[x = 1]")
    calls = page.locator("#c0 .call").all_inner_texts()
    assert ["no answer was read" in one for one in calls] == [False, True]
    assert "500 ms" in calls[0]
    left = page.locator("#c0 .turn.left").all_inner_texts()
    assert [one.split("\n")[0] for one in left] == ["file gone.py is gone", "file new.py", "file solution.py", "printed at the end"]
    assert "x = 2" in left[2]
    assert made.HOSTILE[0].strip()[:10] in left[3]
    assert page.locator("#c1 .turn.left").all_inner_texts() == ["no file was changed"]


@pytest.mark.slow
def test_what_reset_adds_is_read_with_the_prompt_and_splits_nothing(viewer: Callable, made: Any, tmp_path: Path, tab: Tab) -> None:
    game = made.make_game(tmp_path / "game", "Guess.{}", [" 1 to 8", (" 1 to 9", " 3 to 4")])
    page = tab(viewer(game).address)
    page.wait_for_selector("#c0 .turn")
    assert page.locator(".prompt-text").inner_text() == "Guess. 1 to 8"
    assert page.locator(".prompt-text .environment").inner_text().strip() == "1 to 8"
    text = page.locator("main").inner_text()
    assert "split" not in text
    assert "tools" not in text
    assert "environment 0.370 ms" in text
    assert page.locator(".group-list .note").first.inner_text() == "1 × 1, 1 × 0"
    page.keyboard.press("ArrowDown")
    page.wait_for_selector("#c1 .said.environment")
    assert page.locator(".said.environment").all_inner_texts() == [" 3 to 4"]


@pytest.mark.slow
def test_held_out_figures_are_drawn_as_they_are(viewer: Callable, run_folder: Path, tab: Tab) -> None:
    page = tab(viewer(run_folder).address)
    weights = "values => ['reward', 'eval/reward'].map((name) => smoothing(name, values, 0.6))"
    assert page.evaluate(weights, [0.5] * 40) == [0.6, 0]
    assert page.evaluate(weights, [0.5] * 9 + [None] * 31) == [0, 0], "too few points"


@pytest.mark.slow
def test_two_runs_nobody_chose_steps_of_are_compared_by_their_evaluations(
    viewer: Callable, run_folder: Path, made: Any, tmp_path: Path, tab: Tab
) -> None:
    page = tab(viewer(run_folder, made.make_run(tmp_path / "gamma", 40)).address + "#view=compare")
    page.wait_for_selector("#cr0")
    assert page.locator(".side-title").all_inner_texts() == ["alpha, step 40", "gamma, step 40"]
    said = page.locator(".difference").all_inner_texts()
    assert "held-out prompts that both answered at step 40" in said[0]
    assert page.locator(".verdict").all_inner_texts() == ["These data show no difference between Left and Right."]


@pytest.mark.slow
def test_what_the_world_says_is_text(viewer: Callable, made: Any, tmp_path: Path, tab: Tab) -> None:
    page = tab(viewer(made.make_episodes(tmp_path / "hostile", texts=made.HOSTILE)).address)
    page.wait_for_selector("#c0 .call")
    page.wait_for_timeout(200)
    assert page.evaluate("window.pwned") is None
    assert "<script>window.pwned = 1</script>" in page.locator("#c0 .call").first.inner_text()


@pytest.mark.slow
def test_a_step_is_replayed_with_another_algorithm(viewer: Callable, trained: Path, tab: Tab) -> None:
    page = tab(viewer(trained).address)
    page.wait_for_selector(".card")
    page.keyboard.press("p")
    page.select_option('.replay select[name="objective"]', "dr_grpo")
    page.locator('.replay button[type="submit"]').click()
    page.wait_for_selector(".algorithm", timeout=120_000)
    assert page.locator(".algorithm").inner_text().startswith("dr_grpo: ")
    assert "set=objective%3Ddr_grpo" in page.url
    page.wait_for_selector('.quantities button[aria-pressed="true"] >> text=Change')
    changed = colours(page)
    page.keyboard.press("8")
    assert any(colours(page))
    assert colours(page) != changed
    again = tab(page.url)
    again.wait_for_selector(".algorithm")
    assert again.locator('.replay select[name="objective"]').input_value() == "dr_grpo"
    again.get_by_role("button", name="Close").click()
    until(again, "!location.hash.includes('replay')")


@pytest.mark.slow
@pytest.mark.parametrize("where", ["server", "report"])
def test_hostile_completions_are_text(
    viewer: Callable, hostile_folder: Path, tab: Tab, tmp_path: Path, made: Any, where: str
) -> None:
    """Nothing runs, nothing is asked of another host (`tab` watches), nothing moves or hides other text."""
    if where == "server":
        address = viewer(hostile_folder).address
        views = [
            "",
            "#step=1",
            "#step=1&blanks=1",
            "#view=search&text=script",
            "#view=lenses",
            "#view=curves",
            "#view=config",
        ]
    else:
        address = export([hostile_folder], tmp_path / "report.html").as_uri()
        views = ["", "#view=lenses"]
    page = tab(address)
    for hash_ in views:
        page.goto("about:blank")  # an address that differs behind the # alone would not load the page again
        page.goto(address + hash_)
        page.wait_for_selector("main[data-ready]")
        page.wait_for_timeout(200)
        assert page.evaluate("window.pwned") is None
        inside = page.evaluate(
            "document.querySelectorAll('main :is(script, img, iframe, style, base, meta), a[href^=javascript]').length"
        )
        assert inside == 0
        if not hash_:
            page.wait_for_selector(".card")
            text = page.evaluate("[...document.querySelectorAll('.card .text')].map((one) => one.textContent).join('|')")
            for wanted in (
                "<script>window.pwned = 1</script>",
                "onerror=",
                "␛[31mred",
                "[/oops]",
                "U+202E",
                "U+200B",
                "nul␀byte",
                "&lt;script&gt;",
            ):
                assert wanted in text, wanted
            assert "\u202e" not in text
            assert "\u200b" not in text
            assert "\x1b" not in text
        assert page.evaluate("document.documentElement.scrollWidth") <= 1280


@pytest.mark.slow
def test_a_completion_of_100_000_characters_is_shown_piece_by_piece(
    viewer: Callable, hostile_folder: Path, tab: Tab, made: Any
) -> None:
    page = tab(viewer(hostile_folder).address)
    page.wait_for_selector(".card")
    card = f"#c{len(made.HOSTILE) - 1}"
    assert page.locator(f"{card} .t").count() < 1000
    page.locator(f"{card} .more").click()
    until(page, f"document.querySelectorAll('{card} .t').length > 600")
    page.locator(f"{card} .text").evaluate("one => { one.scrollTop = one.scrollHeight; }")
    until(page, f"document.querySelectorAll('{card} .t').length > 1400")


@pytest.mark.slow
def test_a_report_is_the_application_without_a_server(run_folder: Path, other_folder: Path, tab: Tab, tmp_path: Path) -> None:
    path = export([run_folder, other_folder], tmp_path / "report.html")
    page = tab(path.as_uri())
    assert page.locator(".state").inner_text() == "report · step 40 of 40"
    assert cards(page)
    page.keyboard.press("3")
    assert any(colours(page))
    page.keyboard.press("ArrowLeft")
    until(page, "document.querySelector('.steps h1 b').innerText !== '40'")
    assert cards(page)
    for view in ("curves", "lenses", "config", "compare", "search"):
        page.goto(path.as_uri() + f"#view={view}")
        settled(page, view)
        assert page.locator("main [role=alert]").count() == 0, view


@pytest.mark.slow
def test_a_bad_page_says_so_and_the_next_one_works(viewer: Callable, made: Any, tmp_path: Path, chromium: Any) -> None:
    folder = made.make_run(tmp_path / "damaged", 3)
    (folder / "rollouts/000003.parquet").write_bytes(b"PAR1 half of it")
    page = chromium.new_page()
    page.goto(viewer(folder).address + "#step=3")
    page.wait_for_selector("[role=alert] >> text=000003.parquet")
    page.goto(page.url.split("#")[0] + "#step=2")
    page.wait_for_selector(".card")
    page.close()


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_view_is_wider_than_its_window(viewer: Callable, run_folder: Path, tab: Tab, width: int, scheme: str) -> None:
    address = viewer(run_folder).address
    page = tab(address, width=width, scheme=scheme)
    for view in ("groups", "curves", "search", "compare", "lenses", "config"):
        page.goto(f"{address}#view={view}")
        settled(page, view)
        page.wait_for_timeout(150)
        wide = page.evaluate(
            "[...document.querySelectorAll('main *')].filter((one) => one.getBoundingClientRect().right > innerWidth + 1"
            " && !one.closest('.scroll, .strip, svg, nav')).map((one) => one.className || one.tagName).slice(0, 5)"
        )
        assert wide == [], view
        assert page.evaluate("document.documentElement.scrollWidth") <= width, view


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("view", ["groups", "curves", "search&text=so", "compare", "lenses", "config"])
def test_axe_finds_nothing_serious(viewer: Callable, run_folder: Path, tab: Tab, axe: Callable, scheme: str, view: str) -> None:
    page = tab(viewer(run_folder).address + f"#view={view}", scheme=scheme)
    settled(page, view.split("&")[0])
    page.wait_for_timeout(300)
    serious = axe(page)
    assert not serious, serious


@pytest.mark.slow
def test_a_run_that_succeeds_is_not_accused_and_its_times_can_be_read(viewer: Callable, run_folder: Path, tab: Tab) -> None:
    page = tab(viewer(run_folder).address, width=390)
    verdict = lambda *curves: page.evaluate("([reward, accuracy]) => verdictOf(movedBoth(reward, accuracy))", list(curves))  # noqa: E731
    assert verdict([0.5, 0.7, 0.99], [0.98, 1.0, 1.0]).endswith("It is near its ceiling of 100%.")
    assert "may be cheated" in verdict([0.2, 0.5, 0.9], [0.3, 0.3, 0.3])
    assert verdict([0.2, 0.5, 0.9], [0.3, 0.5, 0.7]).endswith("held-out accuracy from 30% to 70%.")
    answer = lambda correlations, *curves: page.evaluate(  # noqa: E731
        "([correlations, reward, accuracy]) => answerOf(correlations, movedBoth(reward, accuracy))", [correlations, *curves]
    )
    assert answer({"length": 0.1}, [0.2, 0.9], [0.3, 0.8]).startswith("No sign of it")
    assert answer({"length": 0.7}, [0.2, 0.9], [0.3, 0.8]) == "There are signs of it: longer texts earn more."
    assert (
        answer({"length": 0.1}, [0.2, 0.9], [0.3, 0.3]) == "There are signs of it: the reward rose and held-out accuracy did not."
    )
    assert "is not known: set eval.every" in answer({"length": 0.1}, [0.2, 0.9], [])
    assert page.evaluate("() => [2.7e-6, 3.4e-4, 1.5].map(shortTime)") == ["< 0.1 ms", "0.340 ms", "1.50 s"]
    standing, card = (page.locator(place).first.bounding_box() for place in (".standing", ".card"))
    assert standing["y"] < card["y"], "on a phone it comes before the completions"


@pytest.mark.slow
def test_numbers_are_written_as_people_write_them(viewer: Callable, run_folder: Path, tab: Tab) -> None:
    page = tab(viewer(run_folder).address)
    assert page.evaluate("() => [9.5e-7, -2e-5, 0.00021, 1e-13].map((value) => fmt(value))") == [
        "9.5×10⁻⁷",
        "−2×10⁻⁵",
        "0.00021",
        "≈ 0",
    ]
    marks = page.evaluate(
        "() => [[0.0030, 0.0032, 0.0034], [0, 0.5, 1], [0, 2e-13, 4e-13], [0, 2000], [0, 0.25, 0.5]].map(labelsOf)"
    )
    assert marks == [
        ["0.0030", "0.0032", "0.0034"],
        ["0", "0.5", "1"],
        ["0", "2×10⁻¹³", "4×10⁻¹³"],
        ["0", "2000"],
        ["0", "0.25", "0.50"],
    ]


@pytest.mark.slow
def test_equal_rows_are_one(viewer: Callable, run_folder: Path, tab: Tab) -> None:
    page = tab(viewer(run_folder).address)
    row = {"step": 1, "group": 2, "reward": 1, "value": 1, "finish": "eos", "digest": 5, "length": 3, "prompt": "a", "excerpt": "b"}
    rows = [row | {"index": 0}, row | {"index": 1}, row | {"index": 2, "digest": 6}, row | {"index": 3, "group": 3}]
    notes = page.evaluate("(rows) => foldedRows(rows).map((one) => one.querySelector('.note').textContent)", rows)
    assert notes == ["× 2 · 3 tokens", "3 tokens", "3 tokens"]


@pytest.mark.slow
def test_a_key_without_a_value_is_no_difference(viewer: Callable, made: Any, run_folder: Path, tmp_path: Path, tab: Tab) -> None:
    configs = {"left": "objective: grpo\nsteps: 3\nteacher: {path: null}\n", "right": "objective: grpo\nsteps: 4\n"}
    folders = [made.make_run(tmp_path / name, 3, config=config) for name, config in configs.items()]
    page = tab(viewer(*folders).address + "#view=config")
    settled(page, "config")
    differences = page.locator(".panel", has_text="Differences of their configurations")
    assert differences.locator("tbody th").all_text_contents() == ["steps"]


@pytest.mark.slow
def test_all_views_stand_in_the_bar_of_a_phone(viewer: Callable, run_folder: Path, tab: Tab) -> None:
    page = tab(viewer(run_folder).address, width=390)
    assert page.evaluate("() => { const bar = document.querySelector('#top nav'); return bar.scrollWidth <= bar.clientWidth; }")


def six_seeds(made: Any, folder: Path) -> list[Path]:
    """Two settings with three seeds each, whose logged rewards differ."""
    folders = []
    for setting in range(2):
        for seed in range(3):
            run = made.make_run(folder / f"mine-lr={setting}-seed={seed}", 6)
            lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            changed = [{**line, "reward": setting + 0.1 * seed + 0.01 * line["step"]} for line in lines]
            (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in changed))
            folders.append(run)
    return folders


@pytest.mark.slow
def test_seeds_are_drawn_as_their_mean_and_each_on_demand(viewer: Callable, made: Any, tab: Tab, tmp_path: Path) -> None:
    page = tab(viewer(*six_seeds(made, tmp_path)).address + "#view=curves&metric=reward")
    page.wait_for_selector(".chart .uplot canvas")
    assert page.locator(".controls fieldset label").all_inner_texts() == ["mine-lr=0 (3 seeds)", "mine-lr=1 (3 seeds)"]
    last = page.locator(".chart .last").first
    assert last.inner_text() == "0.160 ± 0.248 · 1.16 ± 0.248"
    page.wait_for_selector(".letters")
    assert page.locator(".letters li").all_inner_texts() == ["A mine-lr=0: 3 runs", "B mine-lr=1: 3 runs"]
    assert page.locator(".verdict").all_inner_texts() == ["These data show no difference between A and B."]
    page.evaluate(
        "window.drawn = []; const draw = uPlot; uPlot = function (options, ...rest) {"
        " window.drawn.push(options.series.filter((one) => one.label).length - 1); return new draw(options, ...rest); };"
        " uPlot.rangeNum = draw.rangeNum"
    )
    page.locator("#seeds").check()
    until(page, "location.hash.includes('seeds=1') && window.drawn.at(-1) === 8")
    page.locator(".controls fieldset input").last.uncheck()
    until(page, "location.hash.includes('overlay=0') && window.drawn.at(-1) === 4")


@pytest.mark.slow
def test_a_curve_is_saved_as_figure_and_table(viewer: Callable, made: Any, tab: Tab, tmp_path: Path) -> None:
    page = tab(viewer(*six_seeds(made, tmp_path)).address + "#view=curves&metric=reward&x=time")
    page.wait_for_selector(".chart .save")
    texts = {}
    for kind in ("SVG", "CSV"):
        with page.expect_download() as saving:
            page.get_by_label(f"save reward as {kind}", exact=True).click()
        assert saving.value.suggested_filename == f"reward.{kind.lower()}"
        texts[kind] = Path(saving.value.path()).read_text(encoding="utf-8")
    assert texts["SVG"].count("<polygon") == 2 and "seconds" in texts["SVG"]
    assert texts["CSV"].startswith("series,runs,step,seconds,value,low,high\nmine-lr=0,3,1,")
    page.goto(page.url.partition("#")[0] + "#")
    settled(page)
    with page.expect_download() as saving:
        page.get_by_label("save reward as CSV", exact=True).click()
    assert "mine-lr=0-seed=0,1,6," in Path(saving.value.path()).read_text(encoding="utf-8")


@pytest.mark.slow
def test_compare_speaks_of_the_groups_of_two_runs(viewer: Callable, made: Any, tab: Tab, tmp_path: Path) -> None:
    page = tab(viewer(*six_seeds(made, tmp_path)).address + "#view=compare")
    page.wait_for_selector("#cr0")
    page.wait_for_selector(".letters")
    assert page.locator(".side-title").all_inner_texts() == ["mine-lr=0-seed=0, step 6", "mine-lr=1-seed=0, step 6"]
    said = page.locator(".difference").all_inner_texts()
    assert not [text for text in said if "single run" in text] and len(page.locator(".verdict").all()) == 1
    assert page.locator(".letters li").all_inner_texts() == ["A mine-lr=0: 3 runs", "B mine-lr=1: 3 runs"]


@pytest.mark.slow
def test_a_report_of_seeds_holds_their_bands(made: Any, tab: Tab, tmp_path: Path) -> None:
    page = tab(export(six_seeds(made, tmp_path), tmp_path / "report.html").as_uri() + "#view=curves&metric=reward")
    page.wait_for_selector(".chart .uplot canvas")
    page.wait_for_selector(".letters")
    assert page.locator(".chart .last").first.inner_text() == "0.160 ± 0.248 · 1.16 ± 0.248"
    assert page.locator(".save").count() == 0 and page.locator("main [role=alert]").count() == 0


@pytest.mark.slow
def test_a_group_whose_runs_share_no_step_shows_its_seeds(viewer: Callable, made: Any, tab: Tab, tmp_path: Path) -> None:
    """As a sweep does whose last run has just begun; and the names of folders are text."""
    folders = six_seeds(made, tmp_path)
    begun = tmp_path / "mine-lr=1-seed=3"
    begun.mkdir()
    (begun / "config.yaml").write_text("objective: grpo\n", encoding="utf-8")
    (begun / "metrics.jsonl").touch()
    hostile = made.make_run(tmp_path / "<b>\u202eevil", 6)
    page = tab(viewer(*folders, begun, hostile).address + "#view=curves&metric=reward")
    page.wait_for_selector(".letters")
    page.wait_for_selector(".chart .last")
    names = page.locator(".controls fieldset label").all_inner_texts()
    assert names == ["mine-lr=0 (3 seeds)", "mine-lr=1 (4 seeds)", "<b>U+202Eevil"]
    assert page.locator(".chart .last").first.inner_text().count("·") == 1, "of the second group there is no mean"
    said = page.locator(".difference").all_inner_texts()
    assert any(text.startswith("No held-out prompts are paired:") and "seed=3 has no evaluations" in text for text in said)
