// The web UI of transformer-serve. Text from users and the server is set as text, never as HTML.

import { analyze, isolated } from "./words.js";

const PAUSE_MS = 400; // idle time after a keystroke before a request
const RETRY_MS = 2000;
const HINT = "Hover over a word, or Tab to it, to see the model's attention.";
const page = Object.fromEntries([...document.querySelectorAll("[id]")].map((each) => [each.id, each]));

let languages; // {source, target} of the chosen pair
let alternatives; // number to request; lowered if the server's beam is smaller
let newest; // AbortController of the newest request
let timer; // starts the next request
let waiting; // promise that resolves when the server is ready
let rows = []; // sentences shown: {data: raw event, sentence, chosen, element}
let answer; // full translation from the server, once complete
const links = new WeakMap(); // word element -> {others: elements on the other side, weights}

/** Create an element. Undefined or false attributes are omitted; strings become text nodes. */
function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

function say(words) {
  page.message.textContent = words;
  page.message.hidden = !words;
}

// Sentences

/** Create the words of one side: a listbox with arrow-key navigation if any word has a `fact`. */
function boxOf(side, words, label) {
  const known = words.some((word) => word.fact);
  const roles = known ? { role: "listbox", "aria-label": label } : {};
  const box = make("div", { class: `words ${side}`, lang: languages[side], dir: "auto", ...roles });
  for (const word of words) {
    const item = known ? { role: "option", tabindex: -1, title: word.fact } : {};
    word.element = make("span", { class: "word", ...item }, word.text);
    word.element.classList.toggle("unsure", word.confidence < 0.5);
    word.element.style.setProperty("--doubt", 1 - (word.confidence ?? 1));
    box.append(word.before, word.element);
  }
  return box;
}

/** Render a row: the chosen translation and the source sentence. */
function draw(row) {
  const { source: text, source_tokens } = row.sentence;
  const { target, source } = analyze({ source_tokens, ...row.chosen, source: text });
  const box = boxOf("target", target, `Translation: ${row.chosen.translation}`);
  const sourceBox = boxOf("source", source, `Source: ${text}`);
  for (const [words, others] of [[target, source], [source, target]]) {
    const elements = others.map((other) => other.element);
    for (const { element, weights } of words) if (weights) links.set(element, { others: elements, weights });
  }
  box.querySelector("[role=option]")?.setAttribute("tabindex", "0");
  if (!target.length) box.append(make("em", { lang: "en" }, "(no translation found)"));
  row.element.querySelectorAll(".words").forEach((each) => each.remove());
  row.element.prepend(box, sourceBox);
}

/** Create the button for a sentence's alternatives, and the list that it opens. */
function alternativesOf(row) {
  const { hypotheses, index } = row.sentence;
  const id = `alternatives-${index + 1}`;
  const label = `Translations of sentence ${index + 1}, best first`;
  const list = make("ul", { id, role: "list", hidden: "", "aria-label": label });
  const more = `${hypotheses.length - 1} alternative${hypotheses.length > 2 ? "s" : ""}`;
  const which = make("span", { class: "unseen" }, ` for sentence ${index + 1}`);
  const states = { "aria-expanded": "false", "aria-controls": id };
  const button = make("button", { class: "more", ...states }, more, which);
  const open = (yes) => {
    list.hidden = !yes;
    button.setAttribute("aria-expanded", String(yes));
    if (!yes) button.focus();
  };
  const choose = (choice, hypothesis) => {
    row.chosen = hypothesis;
    draw(row);
    list.querySelector("[aria-current]").removeAttribute("aria-current");
    choice.setAttribute("aria-current", "true");
    open(false);
    page.spoken.textContent = hypothesis.translation;
  };
  for (const hypothesis of hypotheses) {
    const text = make("span", { lang: languages.target, dir: "auto" }, hypothesis.translation);
    const score = make("span", { class: "score" }, `score ${hypothesis.score?.toFixed(2) ?? "unknown"}`);
    const choice = make("button", { "aria-current": hypothesis === hypotheses[0] && "true" }, text, score);
    choice.addEventListener("click", () => choose(choice, hypothesis));
    list.append(make("li", {}, choice));
  }
  button.addEventListener("click", () => open(list.hidden));
  list.addEventListener("keydown", (event) => event.key === "Escape" && open(false));
  return [button, list];
}

/**
 * Show a received sentence and return the number of sentences so far. An unchanged sentence keeps
 * the translation chosen by the user.
 */
function place(data) {
  const sentence = JSON.parse(data);
  const old = rows[sentence.index];
  old?.element.classList.remove("old");
  if (old?.data === data) return sentence.index + 1;
  const element = make("li", { class: "sentence" });
  element.classList.toggle("paragraph", sentence.index > 0 && /[\n\r]/.test(sentence.before));
  const row = { data, sentence, chosen: sentence, element };
  draw(row);
  if (sentence.hypotheses?.length > 1) element.append(...alternativesOf(row));
  if (old) old.element.replaceWith(element);
  else page.output.append(element);
  rows[sentence.index] = row;
  return sentence.index + 1;
}

function keepRows(number) {
  rows.splice(number).forEach((row) => row.element.remove());
  page.copy.disabled = !rows.length;
}

/** The full translation with the user's choices, joined as on the server. */
function whole() {
  let [text, at] = ["", 0];
  for (const { sentence, chosen } of rows) {
    const found = answer?.indexOf(sentence.translation, at) ?? -1;
    if (found < 0) return rows.map((row) => row.sentence.before + row.chosen.translation).join("");
    text += answer.slice(at, found) + chosen.translation;
    at = found + sentence.translation.length;
  }
  return text + answer.slice(at);
}

/** Highlight a word and the words that it attends to or that attend to it, or clear highlights. */
function trace(word) {
  for (const name of ["looked", "traced", "tracing"]) {
    page.output.querySelectorAll(`.${name}`).forEach((each) => each.classList.remove(name));
  }
  page.detail.textContent = word?.title ? `${isolated(word.textContent)}: ${word.title}` : HINT;
  if (!links.has(word)) return;
  const { others, weights } = links.get(word);
  const most = Math.max(...weights);
  others.forEach((other, i) => {
    other.style.setProperty("--weight", weights[i] / most);
    other.classList.toggle("looked", weights[i] > 0.1 * most);
  });
  word.classList.add("traced");
  word.closest(".sentence").classList.add("tracing");
}

// The server

/** Yield the events of a stream as [name, data]. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = "", step; !(step = await reader.read()).done; ) {
    const blocks = (rest + step.value).replaceAll("\r\n", "\n").split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const lines = (name) => block.split("\n").filter((line) => line.startsWith(`${name}:`));
      const field = (name) => lines(name).map((line) => line.slice(name.length + 1).trim()).join("\n");
      yield [field("event"), field("data")];
    }
  }
}

/** Send a request, with as many alternatives as the server allows. */
async function ask(q, signal) {
  for (;;) {
    const body = JSON.stringify({ q, ...languages, format: "text", alternatives, attention: true });
    const headers = { "Content-Type": "application/json" };
    const response = await fetch("translate/stream", { method: "POST", headers, body, signal });
    if (response.ok) return response;
    const { error } = await response.json().catch(() => ({}));
    const said = String(error ?? `The server returned status ${response.status}.`);
    if (response.status !== 400 || !alternatives || !said.includes("alternatives")) {
      throw Object.assign(new Error(said), { response });
    }
    alternatives -= 1;
  }
}

/** Wait until the server is ready. Returns true if it was ready immediately. */
async function wait() {
  for (let tries = 0; ; tries++) {
    const response = await fetch("health").catch(() => null);
    if (response?.ok) return tries === 0;
    const status = await response?.json().then((body) => body.status, () => "");
    const compiling = "The server is still compiling, which can take half a minute.";
    const what = response ? "The server is not ready yet." : "The server is not responding.";
    say(`${status === "compiling" ? compiling : what} Retrying automatically.`);
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

const ready = () => waiting ??= wait().finally(() => { waiting = undefined; });

async function translate() {
  clearTimeout(timer);
  newest?.abort();
  const own = newest = new AbortController();
  if (!languages) return;
  answer = undefined;
  say("");
  if (!page.text.value.trim()) return keepRows(0);
  page.copy.disabled = true;
  page.busy.hidden = false;
  rows.forEach((row) => row.element.classList.add("old"));
  let number = 0;
  try {
    const response = await ask(page.text.value, own.signal);
    for await (const [event, data] of events(response.body)) {
      if (own.signal.aborted) return;
      if (event === "sentence") number = place(data);
      if (event === "error") throw new Error(JSON.parse(data).error);
      if (event === "done") answer = JSON.parse(data).translatedText;
    }
    if (answer === undefined) throw new TypeError("the stream ended early");
    keepRows(number);
    page.spoken.textContent = whole();
  } catch (error) {
    if (own.signal.aborted) return;
    keepRows(number);
    await explain(error, own);
  } finally {
    if (newest === own) page.busy.hidden = true;
  }
}

async function explain(error, own) {
  if (error instanceof TypeError) { // no connection, or a lost one
    const broke = await ready();
    if (newest !== own) return;
    if (!broke) return translate();
    return say("The connection was lost before the translation was complete. Press Ctrl+Enter to retry.");
  }
  const seconds = Math.min(Number(error.response?.headers.get("Retry-After")) || 0, 60);
  say(error.message + (seconds ? ` Retrying in ${seconds} s.` : ""));
  if (seconds) timer = setTimeout(translate, 1000 * seconds);
}

// Keys, pointer, controls

const focused = () => page.output.querySelector(".word:focus");

/** The word that a navigation key moves to, if any. */
function neighbor(word, key) {
  const line = word.parentElement;
  const lines = [...page.output.querySelectorAll(".words")];
  const side = [...page.output.querySelectorAll(`.${line.classList[1]} .word`)];
  const right = getComputedStyle(line).direction === "rtl" ? "ArrowLeft" : "ArrowRight";
  const step = key === right || key === "ArrowDown" ? 1 : -1;
  if (key === "Home") return line.firstElementChild;
  if (key === "End") return line.lastElementChild;
  if (key === "ArrowLeft" || key === "ArrowRight") return side[side.indexOf(word) + step];
  const next = lines[lines.indexOf(line) + step];
  const { others = [], weights = [] } = links.get(word) ?? {};
  const best = others[weights.indexOf(Math.max(...weights))]; // within this sentence
  return next?.contains(best) ? best : next?.querySelector(".word");
}

page.output.addEventListener("keydown", (event) => {
  const word = focused();
  if (!word || event.ctrlKey || event.altKey || event.metaKey) return;
  if (event.key === "Escape") page.text.focus();
  else if (event.key === "Enter") word.closest(".sentence").querySelector(".more")?.click();
  else if (/^(Arrow(Left|Right|Up|Down)|Home|End)$/.test(event.key)) neighbor(word, event.key)?.focus();
  else return;
  event.preventDefault();
});
page.output.addEventListener("focusin", ({ target }) => {
  if (!target.matches(".word")) return;
  trace(target);
  if (!target.matches(".target .word")) return; // only target words are Tab stops
  target.parentElement.querySelector("[tabindex='0']")?.setAttribute("tabindex", "-1");
  target.setAttribute("tabindex", "0");
});
page.output.addEventListener("focusout", () => trace());
page.output.addEventListener("pointerover", ({ target }) => trace(target.closest(".word") ?? focused()));
page.output.addEventListener("pointerleave", () => trace(focused()));

page.text.addEventListener("input", () => {
  newest?.abort(); // the server stops immediately
  clearTimeout(timer);
  timer = setTimeout(translate, PAUSE_MS);
  count();
});
page.text.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) translate();
});
page.shades.addEventListener("change", shade);
page.copy.addEventListener("click", () => {
  const fill = (event) => {
    event.clipboardData.setData("text/plain", whole());
    event.preventDefault();
  };
  document.addEventListener("copy", fill, { once: true }); // navigator.clipboard needs HTTPS
  const said = document.execCommand("copy") ? "Copied" : "Blocked by the browser";
  document.removeEventListener("copy", fill);
  page.copy.textContent = page.spoken.textContent = said;
  setTimeout(() => { page.copy.textContent = "Copy"; }, 2000);
});

function shade() {
  page.result.classList.toggle("shades", page.shades.checked);
  page.legend.hidden = !page.shades.checked;
}

function count() {
  const number = [...page.text.value].length;
  page.count.textContent = `${number.toLocaleString("en")} character${number === 1 ? "" : "s"}`;
}

/** English name of a language, or its code. */
function nameOf(code) {
  try {
    return new Intl.DisplayNames("en", { type: "language" }).of(code.replaceAll("_", "-"));
  } catch {
    return code; // not a BCP 47 code
  }
}

async function chooseLanguages() {
  const listed = await (await fetch("languages")).json();
  const pairs = listed.flatMap(({ code, targets }) => targets.map((target) => ({ source: code, target })));
  const names = pairs.map((pair) => `${nameOf(pair.source)} to ${nameOf(pair.target)}`);
  const choose = () => {
    languages = pairs[Math.max(page.pair.selectedIndex, 0)];
    alternatives = 3;
    page.text.lang = languages.source;
    page.spoken.lang = languages.target;
    keepRows(0);
    translate();
  };
  page.pair.append(...names.map((name) => make("option", {}, name)));
  page.pair.addEventListener("change", choose);
  page.pairs.hidden = pairs.length < 2;
  page["one-pair"].textContent = pairs.length < 2 ? names[0] : "";
  choose();
}

shade();
count();
trace();
await ready();
say("");
try {
  await chooseLanguages();
} catch {
  say("Cannot load the languages. Reload the page to retry.");
}
