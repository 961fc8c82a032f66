// The labelling page. No library and no build step; everything it shows comes from its own server.
"use strict";

const $ = (id) => document.getElementById(id);
const make = (tag, text = "", attributes = {}) => {
  const element = document.createElement(tag);
  element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
};
const unique = () => {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (b) => b.toString(16).padStart(2, "0")).join("");
};

const token = new URLSearchParams(location.hash.slice(1)).get("token") || "";
const tab = sessionStorage.getItem("tab") || unique();
sessionStorage.setItem("tab", tab);
let annotator = null;

// -- The server -----------------------------------------------------------------------------------

class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function call(path, body) {
  const headers = { Authorization: `Bearer ${token}` };
  if (body) headers["Content-Type"] = "application/json";
  const options = body ? { method: "POST", headers, body: JSON.stringify(body) } : { headers };
  const response = await fetch(path, options);
  const found = await response.json();
  if (!response.ok) throw new Refused(response.status, found.error);
  return found;
}

const get = (path, parameters = {}) =>
  call(`${path}?${new URLSearchParams({ annotator, tab, ...parameters })}`);

// An event is sent until the server has it; its token makes sure that it is added once.
async function send(event) {
  const body = { ...event, annotator, token: unique() };
  for (;;) {
    try {
      const found = await call("/api/events", body);
      notice("");
      return found;
    } catch (error) {
      if (error instanceof Refused && error.status < 500) throw error;
      notice(`Not saved yet (${error.message}); trying again. Keep this page open.`);
      await new Promise((resolve) => setTimeout(resolve, 1000));
    }
  }
}

function notice(text) {
  $("notice").textContent = text;
  $("notice").hidden = !text;
}

function announce(text) {
  $("announce").textContent = text;
}

// -- The player: all clips in step ----------------------------------------------------------------

const SPEEDS = [0.5, 1, 1.5, 2, 3, 4];

const player = {
  shown: [], // {about, video, canvas, caption}
  playing: false,
  speed: Number(localStorage.getItem("speed")) || 1,
  loop: true,
  clock: 0, // seconds, where there is no film
  last: 0,

  set(shown) {
    this.pause();
    this.shown = shown;
    this.clock = 0;
    for (const { video } of this.films()) video.addEventListener("loadeddata", () => this.ready());
    $("scrub").max = Math.max(0, this.frames() - 1);
    this.draw();
    this.ready();
  },
  films() {
    return this.shown.filter((one) => one.video);
  },
  // The longest clip leads; a shorter one rests at its end.
  leader() {
    return this.films().reduce(
      (best, one) => (!best || one.about.frames > best.about.frames ? one : best), null);
  },
  fps() {
    const leader = this.leader();
    return leader ? leader.about.fps : 15;
  },
  frames() {
    const leader = this.leader();
    return leader ? leader.about.frames : Math.max(1, ...this.shown.map((s) => s.about.steps || 1));
  },
  time() {
    const leader = this.leader();
    return leader ? leader.video.currentTime : this.clock;
  },
  frame() {
    return Math.max(0, Math.min(this.frames() - 1, Math.floor(this.time() * this.fps() + 1e-3)));
  },
  async ready() {
    if (!this.shown.length || this.shown.some((one) => one.about.waiting)) return;
    if (this.films().some(({ video }) => video.readyState < 2)) return;
    timer.begin();
    if (!this.playing && !this.held) await this.play();
  },
  async play() {
    this.held = false;
    if (this.frame() >= this.frames() - 1) this.seek(0);
    this.playing = true;
    const moving = this.films().filter((one) => !this.atEnd(one));
    for (const { video } of moving) video.playbackRate = this.speed;
    this.last = performance.now();
    this.buttons();
    await Promise.all(moving.map(({ video }) => video.play().catch(() => {})));
  },
  pause() {
    this.playing = false;
    for (const { video } of this.films()) video.pause();
    this.buttons();
  },
  toggle() {
    if (this.playing) {
      this.held = true;
      this.pause();
      this.seek(this.frame());
    } else this.play();
  },
  atEnd({ about }) {
    return this.time() >= (about.frames - 0.5) / about.fps;
  },
  // To the middle of a picture, where no rounding can show its neighbour.
  seek(frame) {
    const time = (Math.max(0, Math.min(this.frames() - 1, frame)) + 0.5) / this.fps();
    this.clock = time;
    for (const { video, about } of this.films()) {
      video.currentTime = Math.min(time, (about.frames - 0.5) / about.fps);
    }
    this.draw();
  },
  step(by) {
    this.held = true;
    this.pause();
    this.seek(this.frame() + by);
  },
  faster(by) {
    const now = SPEEDS.indexOf(this.speed);
    this.speed = SPEEDS[Math.max(0, Math.min(SPEEDS.length - 1, now + by))];
    localStorage.setItem("speed", this.speed);
    for (const { video } of this.films()) video.playbackRate = this.speed;
    this.buttons();
  },
  // Small differences are caught up by running a little faster or slower, which nobody sees.
  tick(now) {
    if (this.playing) {
      const leader = this.leader();
      if (!leader) this.clock += ((now - this.last) / 1000) * this.speed;
      this.last = now;
      const time = this.time();
      for (const one of this.films()) {
        if (one === leader) continue;
        const end = (one.about.frames - 0.5) / one.about.fps;
        const behind = Math.min(time, end) - one.video.currentTime;
        if (time >= end) {
          if (!one.video.paused) one.video.pause();
          if (Math.abs(behind) > 0.02) one.video.currentTime = end;
        } else if (Math.abs(behind) > 0.15) one.video.currentTime = time;
        else {
          const nudge = Math.abs(behind) < 0.004 ? 0 : Math.max(-0.2, Math.min(0.2, behind * 5));
          one.video.playbackRate = this.speed * (1 + nudge);
        }
      }
      const over = leader ? leader.video.ended : time >= this.frames() / this.fps();
      if (over && this.loop) {
        this.seek(0);
        this.play();
      }
      else if (over) this.pause();
    }
    this.draw();
    requestAnimationFrame((later) => this.tick(later));
  },
  draw() {
    const frame = this.frame();
    if (document.activeElement !== $("scrub")) $("scrub").value = frame;
    const lead = this.leader() || this.shown[0];
    if (!lead) return;
    const every = lead.about.every || 1;
    const steps = Math.max(...this.shown.map((one) => one.about.steps || 0));
    const step = Math.min(frame * every, steps);
    $("step").textContent = `step ${step} / ${steps}`;
    $("scrub").setAttribute("aria-valuetext", `step ${step} of ${steps}`);
    for (const one of this.shown) {
      const own = Math.min(step, one.about.steps || 0);
      const said = (one.about.captions || [])[Math.min(frame, (one.about.frames || 1) - 1)] || "";
      const over = own < step ? "ended" : "";
      one.caption.textContent = [said, over].filter(Boolean).join(" · ");
      if (one.canvas) drawCurves(one, own);
    }
  },
  buttons() {
    $("play").firstChild.textContent = this.playing ? "Pause " : "Play ";
    $("speed").textContent = `${this.speed}×`;
    $("loop").setAttribute("aria-pressed", this.loop);
  },
};

const COLOURS = ["#1769aa", "#b3541e", "#2e7d32", "#7b3fa0", "#8a6d00", "#00798c"];

function drawCurves({ canvas, about }, step) {
  const width = (canvas.width = canvas.clientWidth * devicePixelRatio);
  const height = (canvas.height = canvas.clientHeight * devicePixelRatio);
  const draw = canvas.getContext("2d");
  const row = height / Math.max(1, about.curves.length);
  const x = (point) => (point / Math.max(1, about.steps - 1)) * (width - 2);
  draw.font = `${Math.min(row * 0.32, 12 * devicePixelRatio)}px sans-serif`;
  about.curves.forEach((curve, i) => {
    const top = i * row + row * 0.1;
    draw.strokeStyle = draw.fillStyle = COLOURS[i % COLOURS.length];
    draw.beginPath();
    curve.values.forEach((value, k) =>
      draw.lineTo(x(about.points[k]), top + (1 - value) * row * 0.8));
    draw.stroke();
    draw.fillText(
      `${curve.name}: ${curve.low.toPrecision(3)} to ${curve.high.toPrecision(3)}`, 4, top + row * 0.3);
  });
  draw.fillStyle = "#8888";
  draw.fillRect(x(Math.min(step, about.steps - 1)), 0, 2 * devicePixelRatio, height);
}

// -- One question ---------------------------------------------------------------------------------

const SAFE = [["Safe", 1], ["Unsafe", 0], ["Can’t tell", null]];
const GROUPS = {
  pair: [
    { name: "first_safe", side: "left", title: "The left one is", choices: SAFE,
      keys: ["Digit1", "Digit2", "Digit3"] },
    { name: "preference", side: "middle", title: "Which one is safer?",
      choices: [["Left is safer", 1], ["About the same", 0.5], ["Right is safer", 0],
        ["Can’t tell", null]],
      keys: ["ArrowLeft", "ArrowUp", "ArrowRight", "ArrowDown"] },
    { name: "second_safe", side: "right", title: "The right one is", choices: SAFE,
      keys: ["Digit8", "Digit9", "Digit0"] },
  ],
  batch: [
    { name: "first_safe", side: "middle", title: "Would you accept this?",
      choices: [["Acceptable", 1], ["Not acceptable", 0], ["Can’t tell", null]],
      keys: ["Digit1", "Digit2", "Digit3"] },
  ],
};
const KEY_NAMES = { ArrowLeft: "←", ArrowUp: "↑", ArrowRight: "→", ArrowDown: "↓" };
const keyName = (code) => KEY_NAMES[code] || code.replace("Digit", "");

let question = null; // as the server tells it
let chosen = {}; // by the group's name; null is "can't tell", undefined is nothing yet
let busy = false;
let returning = false; // from a correction to where one was

const timer = {
  // Counts while the page is seen.
  total: 0, since: null,
  reset() { this.total = 0; this.since = null; },
  begin() { if (this.since === null) this.since = performance.now(); },
  stop() {
    if (this.since !== null) this.total += performance.now() - this.since;
    this.since = null;
  },
  seconds() {
    const running = this.since === null ? 0 : performance.now() - this.since;
    return (this.total + running) / 1000;
  },
};
document.addEventListener("visibilitychange", () => {
  if (document.hidden) timer.stop();
  else if (question) timer.begin();
});

function show(found, draft = null) {
  question = found;
  chosen = {};
  timer.reset();
  const before = found.answer || draft;
  if (before) {
    const [preference, first_safe, second_safe] = before;
    chosen = found.kind === "pair" ? { preference, first_safe, second_safe } : { first_safe };
  } else chosen = JSON.parse(sessionStorage.getItem(`draft ${found.id}`) || "{}");
  notice("");
  player.held = false;
  $("clips").className = $("answers").className = found.kind;
  $("clips").replaceChildren();
  const shown = found.members.map((about, i) => {
    const pair = found.kind === "pair";
    const title = pair ? ["Left", "Right"][i] : `Episode ${i + 1}`;
    const figure = make("figure", "", { class: pair ? ["left", "right"][i] : "" });
    const caption = make("span");
    const line = make("figcaption");
    line.append(make("b", `${title} `), caption);
    $("clips").append(figure);
    const one = { about, figure, caption, line, title };
    fill(one);
    return one;
  });
  player.set(shown);
  if (!shown.some((one) => one.about.waiting)) timer.begin();
  for (const one of shown) if (one.about.waiting) wait(one, found.id);
  $("ask").textContent = found.kind === "pair" ? "" :
    `Would you accept what it does in these ${found.members.length} episodes, taken together?`;
  $("answers").replaceChildren(...GROUPS[found.kind].map(group));
  $("done").firstChild.textContent = found.replaces ? "Save " : "Next ";
  go("work");
  refresh();
  announce(`Question ${found.id}: ${found.kind === "pair" ? "which one is safer?" : $("ask").textContent}`);
}

// Films, curves, or a word while a clip is being drawn.
function fill(one) {
  const { about, figure, title, line } = one;
  one.video = one.canvas = null;
  if (about.clip) {
    one.video = make("video", "", { src: about.clip, preload: "auto", playsinline: "" });
    one.video.muted = true;
    one.video.setAttribute("aria-label", `${title}: clip of ${about.steps} steps`);
    figure.replaceChildren(one.video, line);
  } else if (about.curves) {
    one.canvas = make("canvas", "", { role: "img" });
    one.canvas.setAttribute("aria-label",
      `${title}: curves of ${about.curves.length} observations over ${about.steps} steps`);
    figure.replaceChildren(one.canvas, line);
    if (about.why) figure.append(make("figcaption", `No clip: ${about.why}`));
  } else figure.replaceChildren(make("p", "The clip is being drawn …", { class: "waiting" }), line);
}

async function wait(one, id) {
  while (question && question.id === id && one.about.waiting) {
    await new Promise((resolve) => setTimeout(resolve, 700));
    try {
      one.about = await get("/api/clip", { digest: one.about.digest });
    } catch (error) { /* the next round says whether the server is there */ }
  }
  if (!question || question.id !== id) return;
  fill(one);
  player.set(player.shown);
}

function group({ name, side, title, choices, keys }) {
  const box = make("div", "", { class: side, role: "group", "aria-label": title });
  box.append(make("h2", title));
  choices.forEach(([text, value], i) => {
    const button = make("button", `${text} `, { "data-group": name });
    button.append(make("kbd", keyName(keys[i])));
    button.value = String(value);
    button.addEventListener("click", () => choose(name, value));
    box.append(button);
  });
  return box;
}

function choose(name, value) {
  chosen[name] = value;
  sessionStorage.setItem(`draft ${question.id}`, JSON.stringify(chosen));
  notice("");
  refresh();
}

function refresh() {
  for (const button of $("answers").querySelectorAll("button")) {
    const value = chosen[button.dataset.group];
    button.setAttribute("aria-pressed", value !== undefined && String(value) === button.value);
  }
}

function contradiction() {
  const { preference, first_safe, second_safe } = chosen;
  const says = (...wanted) =>
    preference === wanted[0] && first_safe === wanted[1] && second_safe === wanted[2];
  if (says(1, 0, 1)) return "You say that left is safer, yet that left is unsafe and right is safe.";
  if (says(0, 1, 0)) return "You say that right is safer, yet that right is unsafe and left is safe.";
  return null;
}

async function act(work) {
  if (busy) return;
  busy = true;
  for (const id of ["undo", "skip", "done"]) $(id).disabled = true;
  try {
    await work();
  } catch (error) {
    if (error instanceof Refused && error.status === 409) {
      await next();
      notice(error.message);
    } else notice(error.message);
  } finally {
    busy = false;
    for (const id of ["undo", "skip", "done"]) $(id).disabled = false;
  }
}

const done = () => act(async () => {
  if (!question) return;
  const missing = GROUPS[question.kind].find(({ name }) => chosen[name] === undefined);
  if (missing) {
    notice(`“${missing.title}” has no answer yet; “can’t tell” is one, too.`);
    return;
  }
  const found = contradiction();
  if (found) {
    notice(`${found} That cannot be: correct one of the three.`);
    return;
  }
  const { preference = null, first_safe, second_safe = null } = chosen;
  await send({ kind: "answer", question: question.id, replaces: question.replaces,
    answer: [preference, first_safe, second_safe], seconds: timer.seconds() });
  sessionStorage.removeItem(`draft ${question.id}`);
  announce("Saved.");
  await next();
});

const skip = () => act(async () => {
  if (!question) return;
  await send({ kind: "skip", question: question.id, replaces: question.replaces,
    seconds: timer.seconds() });
  announce("Comes again later.");
  await next();
});

const undo = () => act(async () => {
  const before = question ? await get("/api/answers") : [];
  const { undone } = await send({ kind: "undo" });
  if (undone === null) {
    notice("There is nothing to take back.");
    return;
  }
  const last = before.reduce((a, b) => (a && a.event > b.event ? a : b), null);
  const found = await get("/api/question", { id: undone });  // claims it again
  await progress();
  show(found, last && last.question === undone && !last.skipped ? last.answer : null);
  announce(`Taken back: question ${undone}.`);
});

// -- Whose turn -----------------------------------------------------------------------------------

function told(found) {
  const parts = [`${found.answered} answered`, `${found.left} left`];
  if (found.skipped) parts.push(`${found.skipped} put off`);
  if (found.median_seconds !== null) {
    parts.push(`${found.median_seconds.toFixed(1)} s each`);
    const minutes = Math.ceil((found.median_seconds * found.left) / 60);
    if (found.left) parts.push(`about ${minutes} min to go`);
  }
  $("progress").textContent = parts.join(" · ");
}

async function progress() {
  told(await get("/api/next"));
}

async function next() {
  const found = await get("/api/next");
  told(found);
  if (found.question) {
    show(found.question);
    for (const digest of found.upcoming) ahead(digest);
    return;
  }
  question = null;
  player.set([]);
  $("idle-text").textContent = found.run_is_active
    ? "All is answered for now. A training run is at work and may ask more; new questions appear here."
    : found.open_for_others
      ? "Nothing is left for you; others are at work on the last questions."
      : "All is answered, and no training run is waiting. Thank you!";
  go("idle");
}

// The browser has the next clips before they are asked for.
async function ahead(digest) {
  try {
    const about = await get("/api/clip", { digest });
    if (about.clip) await (await fetch(about.clip)).arrayBuffer();
  } catch (error) { /* they come when they are needed */ }
}

setInterval(async () => {
  if (document.hidden || busy || !annotator) return;
  try {
    if (!$("idle").hidden) await next();
    else if (!$("work").hidden) await progress(); // a sign of life, too
  } catch (error) { /* sending says it */ }
}, 5000);

// -- Looking over -----------------------------------------------------------------------------------

function words({ kind, skipped, answer: [preference, first, second] }) {
  if (skipped) return "put off";
  const safe = (value) => (value === null ? "can’t tell" : value ? "safe" : "unsafe");
  if (kind === "batch") {
    return first === null ? "can’t tell" : first ? "acceptable" : "not acceptable";
  }
  const which = { 1: "left is safer", 0: "right is safer", 0.5: "about the same" };
  const which_text = preference === null ? "can’t tell" : which[preference];
  return `${which_text}; left ${safe(first)}, right ${safe(second)}`;
}

async function review() {
  player.pause();
  timer.stop();
  const rows = await get("/api/answers");
  $("review-rows").replaceChildren(...rows.map((row) => {
    const line = make("tr");
    const again = make("button", "Look again");
    again.setAttribute("aria-label", `Look again at question ${row.question}`);
    again.addEventListener("click", async () => {
      show(await get("/api/question", { id: row.question }));
    });
    const cell = make("td");
    cell.append(again);
    line.append(make("td", `${row.question}`), make("td", words(row)),
      make("td", row.seconds === null ? "" : row.seconds.toFixed(1)), cell);
    return line;
  }));
  const { measures, disagreements } = await get("/api/agreement");
  const items = Object.entries(measures).filter(([, value]) => value !== null)
    .map(([name, value]) => make("li", `${name.replaceAll("_", " ")}: ${value.toFixed(2)}`));
  for (const name of disagreements) items.push(make("li", `people disagree on ${name}`));
  if (!items.length) items.push(make("li", "Nobody else has answered the same questions."));
  $("agreement").replaceChildren(...items);
  go("review");
}

function go(view) {
  for (const id of ["welcome", "work", "idle", "review"]) $(id).hidden = id !== view;
  if (view !== "work") player.pause();
}

async function back() {
  if (annotator) await next();
}

// -- The task's own words: headings, lists, bold, emphasis, code ------------------------------------

function markdown(text) {
  const inline = (parent, line) => {
    for (const part of line.split(/(\*\*[^*]+\*\*|\*[^*]+\*|`[^`]+`)/)) {
      if (part.startsWith("**") && part.length > 4) parent.append(make("strong", part.slice(2, -2)));
      else if (part.startsWith("*") && part.length > 2) parent.append(make("em", part.slice(1, -1)));
      else if (part.startsWith("`") && part.length > 2) parent.append(make("code", part.slice(1, -1)));
      else parent.append(part);
    }
    return parent;
  };
  return text.split(/\n\s*\n/).filter((block) => block.trim()).flatMap((block) => {
    const lines = block.trim().split("\n");
    const heading = /^(#{1,3}) (.*)/.exec(lines[0]);
    if (heading) {
      const first = inline(make(heading[1].length === 1 ? "h2" : "h3"), heading[2]);
      return lines.length > 1 ? [first, ...markdown(lines.slice(1).join("\n"))] : [first];
    }
    if (lines.every((line) => /^([-*]|\d+\.) /.test(line))) {
      const list = make(/^\d/.test(lines[0]) ? "ol" : "ul");
      for (const line of lines) list.append(inline(make("li"), line.replace(/^([-*]|\d+\.) /, "")));
      return [list];
    }
    return [inline(make("p"), lines.join(" "))];
  });
}

// -- Keys -----------------------------------------------------------------------------------------

const COMMANDS = {
  " ": ["play or pause", () => player.toggle()],
  ",": ["one picture back", () => player.step(-1)],
  ".": ["one picture forward", () => player.step(1)],
  s: ["slower", () => player.faster(-1)],
  f: ["faster", () => player.faster(1)],
  l: ["loop", () => { player.loop = !player.loop; player.buttons(); }],
  u: ["undo the last answer, and the one before, …", undo],
  k: ["later: this question comes again at the end", skip],
  Enter: ["next", done],
  r: ["earlier answers", () => ($("review").hidden ? review() : back())],
  h: ["this help", () => ($("welcome").hidden ? go("welcome") : back())],
};

document.addEventListener("keydown", (event) => {
  if (event.repeat && ![",", "."].includes(event.key)) return;
  if (event.ctrlKey || event.altKey || event.metaKey || event.isComposing) return;
  const focus = document.activeElement;
  if (focus && focus.tagName === "INPUT" && focus.type !== "range") return;
  // What has the focus acts by itself: a button on Enter and space, the slider on arrows.
  if (focus && focus.tagName === "BUTTON" && [" ", "Enter"].includes(event.key)) return;
  if (focus && focus.type === "range" && event.code.startsWith("Arrow")) return;
  if (!annotator) return;
  if (!$("work").hidden && question) {
    for (const { name, choices, keys } of GROUPS[question.kind]) {
      const i = keys.indexOf(event.code.replace("Numpad", "Digit"));
      if (i >= 0) {
        event.preventDefault();
        choose(name, choices[i][1]);
        return;
      }
    }
  }
  const command = COMMANDS[event.key.length === 1 ? event.key.toLowerCase() : event.key];
  const anywhere = ["r", "h"].includes(event.key.toLowerCase());
  const idle = event.key.toLowerCase() === "u" && !$("idle").hidden;
  if (command && (anywhere || idle || !$("work").hidden)) {
    event.preventDefault();
    command[1]();
  }
});

// A button that was clicked with the mouse must not answer to the next space or Enter.
document.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (button && event.detail > 0) button.blur();
});

// -- Start ----------------------------------------------------------------------------------------

async function begin(name) {
  annotator = name;
  localStorage.setItem("annotator", name);
  await next();
}

async function start() {
  for (const [id, key] of [["play", " "], ["back", ","], ["forward", "."], ["slower", "s"],
    ["faster", "f"], ["loop", "l"], ["undo", "u"], ["skip", "k"], ["done", "Enter"],
    ["open-review", "r"], ["close-review", "r"], ["open-intro", "h"]]) {
    $(id).addEventListener("click", () => annotator && COMMANDS[key][1]());
  }
  $("scrub").addEventListener("input", () => {
    player.held = true;
    player.pause();
    player.seek(Number($("scrub").value));
  });
  $("scrub").addEventListener("pointerup", () => $("scrub").blur());
  for (const [key, [text]] of Object.entries(COMMANDS)) {
    const term = make("dt");
    term.append(make("kbd", key === " " ? "space" : key));
    $("keys").append(term, make("dd", text));
  }
  for (const { title, choices, keys } of GROUPS.pair) {
    choices.forEach(([text], i) => {
      const term = make("dt");
      term.append(make("kbd", keyName(keys[i])));
      $("keys").append(term, make("dd", `${title.replace("?", "")}: ${text.toLowerCase()}`));
    });
  }
  $("name-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    try {
      await begin($("name").value.trim());
      $("name").blur();
    } catch (error) {
      annotator = null;
      go("welcome");
      notice(error.message);
    }
  });
  player.buttons();
  requestAnimationFrame((now) => player.tick(now));
  let session;
  try {
    session = await call("/api/session");
  } catch (error) {
    notice(error.message);
    return;
  }
  $("intro").replaceChildren(...markdown(session.intro || ""));
  const name = session.annotator || localStorage.getItem("annotator") || "";
  $("name").value = name;
  const seen = `introduced ${session.folder} ${name}`;
  const known = name && sessionStorage.getItem(seen);
  $("name-form").addEventListener("submit", () =>
    sessionStorage.setItem(`introduced ${session.folder} ${$("name").value.trim()}`, "yes"));
  if (known) await begin(name);
  else {
    go("welcome");
    (name ? $("name-form").querySelector("button") : $("name")).focus();
  }
}

window.labelling = { player, timer }; // for tests, and for whoever opens the console
start();
