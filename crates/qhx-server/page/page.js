// The page: chats that branch, streamed answers, and what is known of how they were made. Chats stay in this browser.
"use strict";

const $ = (id) => document.getElementById(id);
const make = (name, properties = {}, ...children) => {
  const node = Object.assign(document.createElement(name), properties);
  node.append(...children);
  return node;
};

// --- Chats: trees of messages. A message's `chosen` is the child that is shown.

const STORE = "qhx-chats";
let chats = [];
let current = null;
let running = null;
let attached = [];
let contextSize = 0;
// Whether the GPU is software on the processor.
let testDevice = false;

// `crypto.randomUUID` and the clipboard are there on https and localhost only, and this page is also served over plain http.
const newId = () => Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");

function newChat() {
  current = { id: newId(), title: "New chat", messages: {}, root: { children: [], chosen: 0 } };
  chats.unshift(current);
  showAll();
}

function load() {
  try {
    chats = JSON.parse(localStorage.getItem(STORE)) || [];
  } catch {
    chats = [];
  }
  if (chats.length) current = chats[0];
  else newChat();
}

function save() {
  try {
    localStorage.setItem(STORE, JSON.stringify(chats));
  } catch {
    notice("The browser has no room for this chat: it is lost when the page is closed.");
  }
}

const parentOf = (message) => (message.parent ? current.messages[message.parent] : current.root);

// The messages that are shown, from the first.
function path() {
  const shown = [];
  for (let at = current.root; at.children.length; ) {
    at = current.messages[at.children[at.chosen]];
    shown.push(at);
  }
  return shown;
}

function add(parent, message) {
  const id = newId();
  const node = { id, parent: parent && parent.id, children: [], chosen: 0, ...message };
  current.messages[id] = node;
  const above = parent || current.root;
  above.children.push(id);
  above.chosen = above.children.length - 1;
  return node;
}

// --- Showing.

const notice = (text) => ($("notice").textContent = text);

function showAll() {
  $("messages").replaceChildren(...path().map(show));
  $("messages").scrollTop = $("messages").scrollHeight;
  gauge();
  const rows = chats.map((chat) => {
    const open = make("button", { textContent: chat.title, onclick: () => ((current = chat), showAll()) });
    if (chat === current) open.setAttribute("aria-current", "true");
    const remove = make("button", { textContent: "×", title: `Delete “${chat.title}”`, onclick: () => deleteChat(chat) });
    remove.setAttribute("aria-label", `Delete chat ${chat.title}`);
    return make("li", {}, open, remove);
  });
  $("chat-list").replaceChildren(...rows);
}

function deleteChat(chat) {
  chats = chats.filter((other) => other !== chat);
  if (chat === current) current = chats[0];
  if (!current) newChat();
  save();
  showAll();
}

function show(message) {
  const article = make("article", { className: message.role });
  article.dataset.id = message.id;
  article.append(make("h3", { textContent: message.role === "user" ? "You" : message.model || "Assistant" }));
  if (message.reasoning) {
    const body = make("div", { className: "reasoning" }, Markdown.render(message.reasoning));
    article.append(make("details", {}, make("summary", { textContent: "Reasoning" }), body));
  }
  const body = make("div", { className: "body" });
  for (const file of message.files || []) body.append(preview(file));
  if (message.showTokens) body.append(tokens(message));
  else body.append(Markdown.render(message.content));
  article.append(body, tools(message));
  return article;
}

function preview(file) {
  // Chats may have been imported: nothing but the file itself is shown.
  if (!/^data:(image|audio)\//.test(file.url)) return make("span", { textContent: file.name });
  if (file.type.startsWith("image/")) return make("img", { src: file.url, alt: file.name });
  const sound = make("audio", { controls: true, src: file.url });
  sound.setAttribute("aria-label", file.name);
  return sound;
}

// The content token by token: each tells what else could have stood there.
function tokens(message) {
  const all = (message.tokens || []).map((token) => {
    const button = make("button", { type: "button", className: "token", textContent: token.token, onclick: () => alternatives(token) });
    button.title = `${(100 * Math.exp(token.logprob)).toFixed(1)} %`;
    button.dataset.sure = Math.exp(token.logprob) < 0.5 ? "0" : "1";
    return button;
  });
  return make("p", {}, ...all);
}

function alternatives(token) {
  const rows = token.top_logprobs.map((other) =>
    make("tr", {}, make("td", { textContent: JSON.stringify(other.token) }), make("td", { textContent: `${(100 * Math.exp(other.logprob)).toFixed(2)} %` })));
  $("alternatives-rows").replaceChildren(...rows);
  $("alternatives-title").textContent = `Instead of ${JSON.stringify(token.token)}`;
  $("alternatives").showModal();
}

function tools(message) {
  const row = make("div", { className: "tools" });
  const button = (text, onclick, label) => {
    const node = make("button", { type: "button", textContent: text, onclick });
    if (label) node.setAttribute("aria-label", label);
    row.append(node);
    return node;
  };
  const siblings = parentOf(message).children;
  if (siblings.length > 1) {
    const turn = (step) => () => {
      const above = parentOf(message);
      above.chosen = (above.chosen + step + siblings.length) % siblings.length;
      save();
      showAll();
    };
    button("‹", turn(-1), "Earlier version");
    row.append(make("span", { textContent: `${siblings.indexOf(message.id) + 1} of ${siblings.length}` }));
    button("›", turn(1), "Later version");
  }
  if (message.role === "user") button("Edit", () => edit(message));
  else {
    button("Again", () => answer(parentOf(message)));
    button("Copy", () => copy(message.content));
    if (message.tokens && message.tokens.length) {
      const toggle = button("Tokens", () => ((message.showTokens = !message.showTokens), showAll()));
      toggle.setAttribute("aria-pressed", String(!!message.showTokens));
    }
    if (message.details) row.append(whereItRan(message));
    if (message.end && message.end !== "stop") row.append(make("span", { textContent: message.end === "length" ? "cut off: no room left" : message.end }));
  }
  return row;
}

function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = make("textarea", { value: text });
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

function deviceName(name) {
  return testDevice && name.startsWith("gpu") ? `${name} (test device)` : name;
}

// Which device ran which stage, and where the time went.
function whereItRan(message) {
  const { timing, stages, fallbacks, cached_tokens: cached } = message.details;
  const byDevice = {};
  for (const { stage, device } of stages) (byDevice[device] ||= []).push(stage);
  const rows = Object.entries(byDevice).map(([device, names]) => make("li", { textContent: `${deviceName(device)}: ${names.length > 4 ? `${names[0]} … ${names.at(-1)} (${names.length} stages)` : names.join(", ")}` }));
  for (const { stage, from, to, reason } of fallbacks) rows.push(make("li", { textContent: `${stage} ran on ${deviceName(to)} instead of ${deviceName(from)}: ${reason}` }));
  const times = `${timing.prompt_tokens} prompt tokens (${cached} cached) in ${timing.prefill_ms.toFixed(0)} ms; ${timing.generated_tokens} tokens at ${timing.decode_tokens_per_second.toFixed(1)} tok/s`;
  return make("details", {}, make("summary", { textContent: "Where it ran" }), make("p", { textContent: times }), make("ul", {}, ...rows));
}

function edit(message) {
  const place = document.querySelector(`[data-id="${message.id}"] .body`);
  const box = make("textarea", { value: message.content, rows: 3 });
  box.setAttribute("aria-label", "Edit your message");
  const done = make("button", { type: "button", textContent: "Send as a new branch" });
  done.onclick = () => answer(add(message.parent && current.messages[message.parent], { role: "user", content: box.value, files: message.files }));
  place.replaceChildren(box, done);
  box.focus();
}

// --- Asking.

const headers = () => ({ "content-type": "application/json", ...($("key").value ? { authorization: `Bearer ${$("key").value}` } : {}) });

async function ask(address, options = {}) {
  for (;;) {
    const response = await fetch(address, { ...options, headers: headers() });
    if (response.ok) return response;
    const text = await response.text();
    let error = { message: `${response.status} ${response.statusText}` };
    try {
      error = JSON.parse(text).error;
    } catch {}
    if (error.code !== "model_loading") throw new Error(error.message);
    // A model that is being loaded is worth waiting for.
    notice(error.message);
    await new Promise((resolve) => setTimeout(resolve, 1000 * (response.headers.get("retry-after") || 1)));
    options.signal?.throwIfAborted();
    notice("");
  }
}

function content(message) {
  const files = message.files || [];
  if (!files.length) return message.content;
  const part = (file) =>
    file.type.startsWith("image/")
      ? { type: "image_url", image_url: { url: file.url } }
      : { type: "input_audio", input_audio: { data: file.url.split(",")[1], format: "wav" } };
  return [...files.map(part), { type: "text", text: message.content }];
}

async function answer(question) {
  if (running) return;
  notice("");
  let shown = [];
  for (let at = question; at && at.id; at = parentOf(at)) shown.unshift(at);
  const messages = shown.map((message) => ({ role: message.role, content: content(message) }));
  if ($("system").value.trim()) messages.unshift({ role: "system", content: $("system").value });
  const request = { model: $("model").value, messages, stream: true, stream_options: { include_usage: true }, logprobs: true, top_logprobs: 5, details: true };
  if ($("temperature").value) request.temperature = Number($("temperature").value);
  if ($("max-tokens").value) request.max_tokens = Number($("max-tokens").value);
  if ($("thinking").checked) request.chat_template_kwargs = { enable_thinking: true };
  const reply = add(question, { role: "assistant", content: "", reasoning: "", tokens: [], model: request.model });
  if (current.title === "New chat") current.title = question.content.slice(0, 60) || "Files";
  running = new AbortController();
  [$("stop").hidden, $("send").hidden] = [false, true];
  $("messages").setAttribute("aria-busy", "true");
  save();
  showAll();
  try {
    const response = await ask("/v1/chat/completions", { method: "POST", body: JSON.stringify(request), signal: running.signal });
    if (!contextSize) models();
    await receive(response, reply);
  } catch (error) {
    reply.end = error.name === "AbortError" ? "stopped" : "failed";
    if (error.name !== "AbortError") notice(error.message);
  }
  running = null;
  [$("stop").hidden, $("send").hidden, $("progress").hidden] = [true, false, true];
  $("messages").removeAttribute("aria-busy");
  save();
  showAll();
}

async function receive(response, reply) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let [text, count, began] = ["", 0, 0];
  const draw = throttled(() => redraw(reply));
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("The connection ended before the answer did.");
    text += value;
    const frames = text.split("\n\n");
    text = frames.pop();
    for (const frame of frames) {
      if (!frame.startsWith("data: ")) continue;
      if (frame === "data: [DONE]") return;
      const chunk = JSON.parse(frame.slice(6));
      if (chunk.error) throw new Error(chunk.error.message);
      if (chunk.prompt_progress) progress(chunk.prompt_progress);
      const [choice] = chunk.choices;
      if (choice) {
        const { delta } = choice;
        if (delta.content || delta.reasoning_content) {
          $("progress").hidden = true;
          began ||= performance.now();
          count++;
          reply.content += delta.content || "";
          reply.reasoning += delta.reasoning_content || "";
          const seconds = (performance.now() - began) / 1000;
          if (seconds > 0.2) $("speed").textContent = `${(count / seconds).toFixed(1)} tok/s`;
        }
        if (choice.logprobs) reply.tokens.push(...choice.logprobs.content);
        if (choice.finish_reason) reply.end = choice.finish_reason;
        if (chunk.details) {
          reply.details = chunk.details;
          $("speed").textContent = `${chunk.details.timing.decode_tokens_per_second.toFixed(1)} tok/s`;
        }
        draw();
      }
      if (chunk.usage) gauge((reply.total = chunk.usage.total_tokens));
    }
  }
}

// Once a frame is enough for eyes.
function throttled(work) {
  let waiting = false;
  return () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => ((waiting = false), work()));
  };
}

function redraw(reply) {
  const article = document.querySelector(`[data-id="${reply.id}"]`);
  const list = $("messages");
  const follows = list.scrollHeight - list.scrollTop - list.clientHeight < 80;
  if (article) {
    // What a reader has opened stays open.
    const open = [...article.querySelectorAll("details")].map((details) => details.open);
    const next = show(reply);
    next.querySelectorAll("details").forEach((details, place) => (details.open = !!open[place]));
    article.replaceWith(next);
  }
  if (follows) list.scrollTop = list.scrollHeight;
}

function progress({ processed, total }) {
  $("progress").hidden = processed >= total;
  [$("progress-bar").value, $("progress-bar").max] = [processed, total];
}

// How full the context is after the last answer that is shown.
function gauge(tokens = path().findLast((message) => message.total)?.total || 0) {
  $("context").value = contextSize ? tokens / contextSize : 0;
  $("context-text").textContent = contextSize ? `${tokens} of ${contextSize}` : "–";
}

// --- Files: dropped, chosen, or spoken.

const asUrl = (blob) =>
  new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });

async function attach(files) {
  for (const file of files) {
    if (!/^(image|audio)\//.test(file.type)) {
      notice(`${file.name} is neither an image nor a sound.`);
      continue;
    }
    attached.push({ name: file.name, type: file.type, url: await asUrl(file) });
  }
  showAttached();
}

function showAttached() {
  const rows = attached.map((file, place) => {
    const remove = make("button", { type: "button", textContent: "×", onclick: () => (attached.splice(place, 1), showAttached()) });
    remove.setAttribute("aria-label", `Remove ${file.name}`);
    return make("li", {}, file.type.startsWith("image/") ? make("img", { src: file.url, alt: file.name }) : file.name, remove);
  });
  $("attached").replaceChildren(...rows);
}

let recorder = null;
async function record() {
  if (recorder) return recorder.stop();
  if (!navigator.mediaDevices) return notice("Browsers give the microphone to pages on https and localhost only. A sound file can be attached instead.");
  try {
    const stream = await navigator.mediaDevices.getUserMedia({ audio: true });
    const chunks = [];
    recorder = new MediaRecorder(stream);
    recorder.ondataavailable = (event) => chunks.push(event.data);
    recorder.onstop = async () => {
      stream.getTracks().forEach((track) => track.stop());
      recorder = null;
      $("record").setAttribute("aria-pressed", "false");
      $("record").textContent = "Record";
      await attach([await toWav(new Blob(chunks))]);
    };
    recorder.start();
    $("record").setAttribute("aria-pressed", "true");
    $("record").textContent = "Stop recording";
  } catch (error) {
    notice(`The microphone cannot be used: ${error.message}`);
  }
}

// What a browser records, as a WAV file of 16 kHz, which every model that hears can read.
async function toWav(blob) {
  const rate = 16000;
  const whole = await new AudioContext().decodeAudioData(await blob.arrayBuffer());
  const plain = new OfflineAudioContext(1, Math.ceil(whole.duration * rate), rate);
  const source = plain.createBufferSource();
  source.buffer = whole;
  source.connect(plain.destination);
  source.start();
  const samples = (await plain.startRendering()).getChannelData(0);
  const bytes = new DataView(new ArrayBuffer(44 + 2 * samples.length));
  const text = (at, word) => [...word].forEach((letter, place) => bytes.setUint8(at + place, letter.charCodeAt(0)));
  text(0, "RIFF");
  bytes.setUint32(4, 36 + 2 * samples.length, true);
  text(8, "WAVEfmt ");
  bytes.setUint32(16, 16, true);
  bytes.setUint16(20, 1, true);
  bytes.setUint16(22, 1, true);
  bytes.setUint32(24, rate, true);
  bytes.setUint32(28, 2 * rate, true);
  bytes.setUint16(32, 2, true);
  bytes.setUint16(34, 16, true);
  text(36, "data");
  bytes.setUint32(40, 2 * samples.length, true);
  samples.forEach((sample, place) => bytes.setInt16(44 + 2 * place, Math.max(-1, Math.min(1, sample)) * 32767, true));
  return new File([bytes.buffer], "recording.wav", { type: "audio/wav" });
}

// --- The server.

async function models() {
  try {
    const info = await (await ask("/server_info")).json();
    const chosen = $("model").value;
    $("model").replaceChildren(...info.model_names.map((name) => make("option", { value: name, textContent: name, selected: name === chosen })));
    about(info);
  } catch (error) {
    notice(error.message);
    setTimeout(models, 2000);
  }
}

function about(info) {
  const model = info.models.find((known) => known.id === $("model").value);
  contextSize = model ? model.context : 0;
  testDevice = model?.test_device ?? false;
  $("device").textContent = model ? `${model.takes}, on ${[...new Set(model.stages.map((stage) => deviceName(stage.device)))].join(" and ")}` : "not loaded";
  gauge();
}

async function verify() {
  const badge = $("badge");
  [badge.className, badge.textContent] = ["", "Verifying …"];
  $("verify").disabled = true;
  try {
    const report = await (await ask("/verify", { method: "POST", body: JSON.stringify({ model: $("model").value }) })).json();
    [badge.className, badge.textContent, badge.title] = [report.passed ? "pass" : "fail", report.passed ? "✓ passes its oracle here" : "✗ fails its oracle here", report.result];
  } catch (error) {
    [badge.className, badge.textContent] = ["fail", error.message];
  }
  $("verify").disabled = false;
}

function exportChats() {
  const link = make("a", { download: "qhx-chats.json", href: URL.createObjectURL(new Blob([JSON.stringify(chats)], { type: "application/json" })) });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

async function importChats(file) {
  try {
    const more = JSON.parse(await file.text());
    if (!Array.isArray(more) || more.some((chat) => !chat.messages || !chat.root)) throw new Error("these are no chats");
    chats = [...more, ...chats];
    current = chats[0];
    save();
    showAll();
  } catch (error) {
    notice(`${file.name} cannot be imported: ${error.message}`);
  }
}

function send() {
  const text = $("question").value.trim();
  if (running || (!text && !attached.length)) return;
  const last = path().at(-1);
  const question = add(last, { role: "user", content: text, files: attached });
  $("question").value = "";
  attached = [];
  showAttached();
  answer(question);
}

$("ask").onsubmit = (event) => (event.preventDefault(), send());
$("question").onkeydown = (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
};
// Handlers that return false would swallow what is typed.
document.onkeydown = (event) => {
  if (event.key === "Escape") running?.abort();
};
$("stop").onclick = () => running?.abort();
$("new-chat").onclick = () => (newChat(), $("question").focus());
$("toggle-chats").onclick = () => {
  $("chats").hidden = !$("chats").hidden;
  $("toggle-chats").setAttribute("aria-expanded", String(!$("chats").hidden));
};
$("attach").onclick = () => $("files").click();
$("files").onchange = () => attach($("files").files);
$("record").onclick = record;
$("verify").onclick = verify;
$("export").onclick = exportChats;
$("import").onclick = () => $("import-file").click();
$("import-file").onchange = () => importChats($("import-file").files[0]);
$("model").onchange = models;
$("key").onchange = models;
document.ondragover = (event) => (event.preventDefault(), $("ask").classList.add("over"));
document.ondragleave = () => $("ask").classList.remove("over");
document.ondrop = (event) => (event.preventDefault(), $("ask").classList.remove("over"), attach(event.dataTransfer.files));
$("question").onpaste = (event) => {
  if (event.clipboardData.files.length) attach(event.clipboardData.files);
};

load();
showAll();
models();
$("question").focus();
