"""The page in a real browser: stream, stop, branch, alternatives, verify, reload, phone, nothing asked of anybody else, nothing that a model writes run.

    python page.py http://127.0.0.1:8080 CHROMIUM QHX [FOLDER FOR SCREENSHOTS]

The server must serve the built-in model; QHX is the binary, which also serves it under another name. Needs `playwright` (the package alone, no browser of its own).
"""

import base64
import json
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import expect, sync_playwright

ADDRESS, CHROMIUM, QHX = sys.argv[1].rstrip("/"), sys.argv[2], sys.argv[3]
SHOTS = Path(sys.argv[4]) if len(sys.argv) > 4 else None
# A name that is not localhost, where browsers give pages less than there.
NAME, KEY = "qhx.test", "a-key"
# What is waited for comes soon, unless the machine has much else to do.
expect.set_options(timeout=60_000)
ATTACKS = [
    "<script>window.hit = 1</script>",
    "<img src=x onerror='window.hit = 1'>",
    "[click](javascript:window.hit=1)",
    "[x](https://example.com/\" onmouseover=\"window.hit=1)",
    "<svg onload=window.hit=1>",
    "```\n</code></pre><script>window.hit=1</script>\n```",
    "`<b onclick=window.hit=1>`",
    "| <iframe srcdoc='<script>parent.hit=1</script>'> | b |\n|---|---|\n| c | d |",
    "# <a href=\"data:text/html,<script>1</script>\">x</a>",
]


def check_inert(page):
    """What was written is there as text: it has become no element, and nothing of it was run."""
    # Images that cannot be loaded and scripts would have run by the next frame.
    page.evaluate("new Promise(done => requestAnimationFrame(() => setTimeout(done, 100)))")
    assert page.evaluate("window.hit") is None, "something that a model wrote was run"
    assert page.evaluate("document.querySelectorAll('iframe, svg, [onerror], [onclick], [onload], a[href^=\"javascript\"], a[href^=\"data\"]').length") == 0
    assert page.evaluate("document.querySelectorAll('script').length") == 2


def by_keyboard(browser):
    """A chat without a pointer: everything is reached with the tab key, and what has the focus shows it."""
    page = browser.new_context().new_page()
    page.goto(ADDRESS)
    expect(page.locator("#model option")).to_have_count(1)
    expect(page.locator("#question")).to_be_focused()
    page.keyboard.type("What is the capital of Italy?")
    page.keyboard.press("Enter")
    expect(page.locator("article.assistant .body")).to_have_text("The capital of Italy is Rome.")
    page.wait_for_selector("#send", state="visible")
    page.evaluate("document.activeElement.blur()")
    reached = []
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.textContent.trim() || document.activeElement.id"))
        if reached[-1] == "Tokens":
            break
    assert {"Skip to the question", "Chats", "Verify", "Edit", "Again", "Copy", "Tokens"} <= set(reached), reached
    page.keyboard.press("Enter")
    page.locator(".token").nth(2).focus()
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
    page.keyboard.press("Enter")
    expect(page.locator("#alternatives")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#alternatives")).not_to_be_visible()


def by_another_name(browser):
    """Over plain http from another machine: no secure context, and a key."""
    server = subprocess.Popen([QHX, "serve", "--port", "0", "--api-key", KEY], stderr=subprocess.PIPE, text=True)
    try:
        port = next(line for line in server.stderr if "listening on" in line).strip().rsplit(":", 1)[1]
        page = browser.new_context().new_page()
        problems = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(f"http://{NAME}:{port}")
        assert not page.evaluate("window.isSecureContext")
        page.locator("#settings summary").click()
        page.fill("#key", KEY)
        page.press("#key", "Tab")
        expect(page.locator("#model option")).to_have_count(1)
        page.fill("#question", "What is the capital of Portugal?")
        page.press("#question", "Enter")
        expect(page.locator("article.assistant .body").last).to_have_text("The capital of Portugal is Lisbon.")
        page.get_by_role("button", name="Copy").last.click()
        page.get_by_role("button", name="Record").click()
        expect(page.locator("#notice")).to_contain_text("https and localhost only")
        assert not problems, problems
    finally:
        server.terminate()
        server.wait()


def run(browser):
    context = browser.new_context(viewport={"width": 1200, "height": 800})
    page = context.new_page()
    asked, problems = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))

    def shot(name):
        if SHOTS:
            page.screenshot(path=SHOTS / f"{name}.png")

    def ask(text):
        page.fill("#question", text)
        page.press("#question", "Enter")
        page.wait_for_selector("#send", state="visible")

    page.goto(ADDRESS)
    expect(page.locator("#model option")).to_have_count(1)
    ask("What is the capital of Portugal?")
    answers = page.locator("article.assistant .body")
    expect(answers.last).to_have_text("The capital of Portugal is Lisbon.")
    shot("answer")
    # Tokens and what else could have stood there.
    page.get_by_role("button", name="Tokens").click()
    page.locator(".token").nth(4).click()
    expect(page.locator("#alternatives-rows tr")).to_have_count(5)
    shot("alternatives")
    page.get_by_role("button", name="Close").click()
    page.get_by_role("button", name="Tokens").click()
    page.get_by_text("Where it ran").click()
    expect(page.locator("article.assistant details li").first).to_contain_text("cpu")
    # Another branch, and back.
    page.get_by_role("button", name="Edit").first.click()
    page.get_by_label("Edit your message").fill("What is the capital of Italy?")
    page.get_by_role("button", name="Send as a new branch").click()
    expect(answers.last).to_have_text("The capital of Italy is Rome.")
    page.get_by_role("button", name="Earlier version").click()
    expect(answers.last).to_have_text("The capital of Portugal is Lisbon.")
    # Chats are there after a reload, and how full the context is.
    page.reload()
    expect(answers.last).to_have_text("The capital of Portugal is Lisbon.")
    expect(page.locator("#context-text")).to_contain_text("of 1024")
    expect(page.locator("#context-text")).not_to_contain_text("0 of 1024", use_inner_text=True)
    # A long answer is stopped, and the server with it.
    page.locator("#settings summary").click()
    page.fill("#temperature", "1.9")
    endless = lambda route: route.continue_(post_data=json.dumps({**route.request.post_data_json, "ignore_eos": True}))
    page.route("**/v1/chat/completions", endless)
    page.fill("#question", "Tell me a story.")
    page.press("#question", "Enter")
    expect(answers.last).not_to_be_empty()
    page.press("body", "Escape")
    page.wait_for_selector("#send", state="visible")
    expect(page.locator("article.assistant .tools").last).to_contain_text("stopped")
    page.unroute("**/v1/chat/completions")
    page.wait_for_function("fetch('/loads').then(r => r.json()).then(l => l.loads.every(m => m.num_total_reqs === 0))")
    # The oracle.
    page.get_by_role("button", name="Verify").click()
    expect(page.locator("#badge")).to_contain_text("passes", timeout=120_000)
    shot("verified")
    # A model that is being loaded is waited for.
    loading = {"error": {"message": "the model `builtin` is being loaded: opening", "code": "model_loading"}}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=503, headers={"retry-after": "1"}, json=loading), times=1)
    page.fill("#temperature", "0")
    ask("What is the capital of Spain?")
    expect(answers.last).to_have_text("The capital of Spain is Madrid.")
    # An image is attached and shown; the demo model has no eyes, and says so.
    pixel = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
    page.set_input_files("#files", {"name": "dot.png", "mimeType": "image/png", "buffer": base64.b64decode(pixel)})
    expect(page.locator("#attached img")).to_have_count(1)
    ask("What is this?")
    expect(page.locator("#notice")).to_contain_text("takes no")
    expect(page.locator("article.user img")).to_have_count(1)
    # By drop, and taken away again.
    drop = """(data) => { const files = new DataTransfer(); files.items.add(new File([Uint8Array.from(atob(data), c => c.charCodeAt(0))], "drop.png", { type: "image/png" }));
        document.getElementById("ask").dispatchEvent(new DragEvent("drop", { bubbles: true, cancelable: true, dataTransfer: files })); }"""
    page.evaluate(drop, pixel)
    page.get_by_label("Remove drop.png").click()
    expect(page.locator("#attached img")).to_have_count(0)
    # What a model writes is text, in a stream, in its reasoning, after a reload, and in chats from elsewhere.
    page.get_by_role("button", name="Chats", exact=True).click()
    page.get_by_role("button", name="New chat", exact=True).first.click()
    chunks = [{"choices": [{"index": 0, "delta": {field: text + "\n\n"}}]} for text in ATTACKS for field in ("content", "reasoning_content")]
    stream = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=stream), times=1)
    ask(ATTACKS[0])
    expect(answers.last).to_contain_text("<script>window.hit = 1</script>")
    shot("attacks")
    check_inert(page)
    message = {"id": "m", "parent": None, "children": [], "chosen": 0, "role": "user", "content": ATTACKS[1], "files": [{"name": ATTACKS[1], "type": "image/png", "url": "javascript:window.hit=1"}]}
    hostile = [{"id": "c", "title": ATTACKS[0], "messages": {"m": message}, "root": {"children": ["m"], "chosen": 0}}]
    page.set_input_files("#import-file", {"name": "chats.json", "mimeType": "application/json", "buffer": json.dumps(hostile).encode()})
    expect(page.locator("#chat-list button").first).to_have_text(ATTACKS[0])
    expect(page.locator("article.user .body")).to_contain_text(ATTACKS[1])
    check_inert(page)
    page.reload()
    expect(page.locator("article.user .body")).to_contain_text(ATTACKS[1])
    check_inert(page)
    # Every control has a name.
    nameless = page.evaluate("[...document.querySelectorAll('button, input, select, textarea')].filter(e => !(e.textContent.trim() || e.labels?.length || e.ariaLabel || e.title || e.hidden)).map(e => e.outerHTML)")
    assert not nameless, nameless
    elsewhere = [address for address in asked if not address.startswith((ADDRESS, "data:", "blob:"))]
    assert not elsewhere, elsewhere
    refused = [problem for problem in problems if "400" not in problem and "503" not in problem and "javascript:" not in problem]
    assert not refused, refused
    by_keyboard(browser)
    by_another_name(browser)
    phone = browser.new_context(viewport={"width": 360, "height": 640}, color_scheme="dark").new_page()
    phone.goto(ADDRESS)
    phone.fill("#question", "What is 3 plus 4?")
    phone.click("#send")
    phone.wait_for_selector("#send", state="visible")
    expect(phone.locator("article.assistant .body").last).not_to_be_empty()
    assert phone.evaluate("document.documentElement.scrollWidth <= 360"), "the page is wider than a phone"
    if SHOTS:
        phone.screenshot(path=SHOTS / "phone.png")
    print(json.dumps({"requests": len(asked), "attacks": len(ATTACKS)}))


with sync_playwright() as playwright:
    browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", f"--host-resolver-rules=MAP {NAME} 127.0.0.1"])
    run(browser)
    browser.close()
    print("the page: as expected")
