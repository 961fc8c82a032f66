// The labelling page. No library and no build step; everything it shows comes from its own server.
"use strict";

const $ = (id) => document.getElementById(id);
const make = (tag, text = "", attributes = {}) => {
  const element = document.createElement(tag);
  element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
};
const hidden = (text) => make("span", text, { class: "for-readers" });
const unique = () =>
  Array.from(crypto.getRandomValues(new Uint8Array(16)), (b) => b.toString(16).padStart(2, "0"))
    .join("");
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const within = (low, value, high) => Math.max(low, Math.min(high, value));

const token = new URLSearchParams(location.hash.slice(1)).get("token") || "";
const tab = sessionStorage.getItem("tab") || unique();
sessionStorage.setItem("tab", tab);
let annotator = null;

function notice(text) {
  $("notice").textContent = text;
  $("notice").hidden = !text;
}

function announce(text) {
  $("announce").textContent = text;
}

function go(view, title) {
  for (const id of ["welcome", "work", "idle", "review"]) $(id).hidden = id !== view;
  $("title").textContent = title;
  if (view !== "work") player.pause();
}

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

let sending = false;

// An event is sent until the server has it; its token makes sure that it is added once.
async function send(event) {
  const body = { ...event, annotator, token: unique() };
  sending = true; // what is sent is what is shown
  try {
    for (;;) {
      try {
        const found = await call("/api/events", body);
        notice("");
        return found;
      } catch (error) {
        if (error instanceof Refused && error.status < 500) throw error;
        notice(`Not saved yet (${error.message}); trying again. Keep this page open.`);
        await sleep(1000);
      }
    }
  } finally {
    sending = false;
  }
}

// -- The player: all clips in step ----------------------------------------------------------------

const SPEEDS = [0.5, 1, 1.5, 2, 3, 4];

const player = {
  shown: [], // {about, title, figure, caption, video, canvas}
  films: [], // those of them that have a video
  lead: null, // the film that lasts longest, which the others follow; null if there is none
  frames: 1,
  fps: 15,
  clock: 0, // seconds, where there is no film
  ready: false,
  playing: false,
  held: false, // by the person: a clip that comes later does not start by itself
  loop: true,
  speed: Number(localStorage.getItem("speed")) || 1,
  seconds: 0, // that the question has been seen
  last: 0, // when `tick` was called
  drawn: null,

  set(shown) {
    this.pause();
    const films = shown.filter((one) => one.video);
    for (const one of films) one.end = (one.about.frames - 0.5) / one.about.fps;
    const [lead = null] = [...films].sort((a, b) => b.end - a.end);
    Object.assign(this, { shown, films, lead, clock: 0, ready: false, drawn: null });
    this.fps = lead ? lead.about.fps : 15;
    // Of curves a picture before each step, and one after the last.
    const longest = Math.max(0, ...shown.map((one) => one.about.steps || 0));
    this.frames = lead ? lead.about.frames : longest + 1;
    for (const one of films) one.video.addEventListener("loadeddata", () => this.begin());
    $("scrub").max = this.frames - 1;
    this.begin();
  },
  async begin() {
    if (!this.shown.length || this.shown.some((one) => one.about.waiting)) return;
    if (this.films.some(({ video }) => video.readyState < 2)) return;
    this.ready = true;
    if (!this.playing && !this.held) await this.play();
  },
  time() {
    return this.lead ? this.lead.video.currentTime : this.clock;
  },
  frame() {
    return within(0, Math.floor(this.time() * this.fps + 1e-3), this.frames - 1);
  },
  // Steps from one picture to the next.
  every() {
    return (this.lead || this.shown[0]).about.every || 1;
  },
  async play() {
    if (this.frame() >= this.frames - 1) this.seek(0);
    this.held = false;
    this.playing = true;
    this.buttons();
    const moving = this.films.filter((one) => this.time() < one.end).map(({ video }) => video);
    for (const video of moving) video.playbackRate = this.speed;
    await Promise.all(moving.map((video) => video.play().catch(() => {})));
  },
  pause() {
    this.playing = false;
    for (const { video } of this.films) video.pause();
    this.buttons();
  },
  // By the person: stop, and show one picture.
  hold(frame) {
    this.held = true;
    this.pause();
    this.seek(frame);
  },
  toggle() {
    if (this.playing) this.hold(this.frame());
    else this.play();
  },
  // To the middle of a picture, where no rounding can show its neighbour.
  seek(frame) {
    this.clock = (within(0, frame, this.frames - 1) + 0.5) / this.fps;
    for (const { video, end } of this.films) video.currentTime = Math.min(this.clock, end);
  },
  faster(by) {
    this.speed = SPEEDS[within(0, SPEEDS.indexOf(this.speed) + by, SPEEDS.length - 1)];
    localStorage.setItem("speed", this.speed);
    for (const { video } of this.films) video.playbackRate = this.speed;
    this.buttons();
  },
  // With every picture of the screen; the browser calls it only while the page is seen.
  tick(now) {
    const passed = Math.min(1, (now - this.last) / 1000);
    this.last = now;
    if (this.ready && !$("work").hidden) this.seconds += passed;
    if (this.playing) {
      this.clock += passed * this.speed;
      for (const one of this.films) if (one !== this.lead) this.follow(one);
      const over = this.lead ? this.lead.video.ended : this.clock >= this.frames / this.fps;
      if (over) moments.release(null, true);
      if (over && this.loop) {
        this.seek(0);
        this.play();
      } else if (over) this.pause();
    }
    this.draw();
    requestAnimationFrame((later) => this.tick(later));
  },
  // Small differences are caught up by running a little faster or slower, which nobody sees; a
  // shorter film rests at its end.
  follow({ video, end }) {
    const time = this.time();
    const behind = Math.min(time, end) - video.currentTime;
    if (time >= end) {
      if (!video.paused) video.pause();
      if (Math.abs(behind) > 0.02) video.currentTime = end;
    } else if (Math.abs(behind) > 0.15) video.currentTime = time;
    else {
      const nudge = Math.abs(behind) < 0.004 ? 0 : within(-0.2, behind * 5, 0.2);
      video.playbackRate = this.speed * (1 + nudge);
    }
  },
  draw() {
    const frame = this.frame();
    if (frame === this.drawn || !this.shown.length) return;
    this.drawn = frame;
    const steps = Math.max(...this.shown.map((one) => one.about.steps || 0));
    const step = Math.min(Math.round(frame * this.every()), steps);
    $("scrub").value = frame;
    $("scrub").setAttribute("aria-valuetext", `step ${step} of ${steps}`);
    $("step").textContent = `step ${step} / ${steps}`;
    for (const one of this.shown) {
      const { steps: own = 0, captions = [] } = one.about;
      const ownFrame = one.video ? Math.floor(this.time() * one.about.fps + 1e-3) : frame;
      const said = captions[within(0, ownFrame, captions.length - 1)];
      one.caption.textContent = [said, own < step && "ended"].filter(Boolean).join(" · ");
      if (one.canvas) drawCurves(one, Math.min(step, own));
      if (one.bar) moments.draw(one, Math.min(step, own));
    }
  },
  buttons() {
    $("play").firstChild.textContent = this.playing ? "Pause " : "Play ";
    $("speed").textContent = `${this.speed}×`;
    $("loop").setAttribute("aria-pressed", this.loop);
  },
};

function drawCurves({ canvas, about }, step) {
  const width = (canvas.width = canvas.clientWidth * devicePixelRatio);
  const height = (canvas.height = canvas.clientHeight * devicePixelRatio);
  const draw = canvas.getContext("2d");
  const row = height / Math.max(1, about.curves.length);
  const x = (point) => (point / Math.max(1, about.steps - 1)) * (width - 2);
  draw.strokeStyle = draw.fillStyle = getComputedStyle(canvas).color;
  draw.font = `${Math.min(row * 0.32, 12 * devicePixelRatio)}px sans-serif`;
  about.curves.forEach((curve, i) => {
    const top = i * row + row * 0.1;
    draw.beginPath();
    curve.values.forEach((value, k) =>
      draw.lineTo(x(about.points[k]), top + (1 - value) * row * 0.8));
    draw.stroke();
    const range = `${curve.low.toPrecision(3)} to ${curve.high.toPrecision(3)}`;
    draw.fillText(`${curve.name}: ${range}`, 4, top + row * 0.3);
  });
  draw.fillStyle = "#8888";
  draw.fillRect(x(Math.min(step, about.steps - 1)), 0, 2 * devicePixelRatio, height);
}

// -- Unsafe moments of a pair: stretches of steps, by a key that is held or on the time line --------

const REACTION = 0.25; // seconds from what is seen to the key, which are taken back
const MOMENT_KEYS = ["x", "m"];

// Sorted, apart, and within the episode.
function joined(stretches, steps) {
  const found = [];
  for (const [start, end] of [...stretches].sort((a, b) => a[0] - b[0])) {
    const last = found[found.length - 1];
    const [from, to] = [within(0, start, steps), within(0, end, steps)];
    if (last && from <= last[1]) last[1] = Math.max(last[1], to);
    else if (from < to) found.push([from, to]);
  }
  return found;
}

const moments = {
  holding: new Map(), // by the place of a clip whose key is held: the first step

  of: (one) => (chosen.unsafe || [[], []])[one.place],
  set(one, stretches) {
    const unsafe = chosen.unsafe || [[], []];
    unsafe[one.place] = joined(stretches, one.about.steps);
    choose("unsafe", unsafe.some((marked) => marked.length) ? unsafe : undefined);
    const count = unsafe[one.place].length;
    announce(`${one.title}: ${count} unsafe moment${count === 1 ? "" : "s"}`);
  },
  // Steps that led to the picture that is shown, less those of the time that a person takes.
  steps() {
    const late = player.playing ? Math.round(REACTION * player.speed * player.fps) : 0;
    return Math.round(Math.max(0, player.frame() - late) * player.every());
  },
  // From where the key was pressed to the picture that is shown, which is in it.
  held(one) {
    const from = this.holding.get(one.place);
    return [from, Math.max(this.steps(), from + Math.round(player.every()))];
  },
  press(one) {
    if (!one || !one.bar || !player.ready || this.holding.has(one.place)) return;
    this.holding.set(one.place, Math.max(0, this.steps() - Math.round(player.every())));
    this.draw(one, this.steps());
    one.hold.setAttribute("aria-pressed", true);
  },
  // That of one clip, or all that are held; to the last step, where the film has ended under them.
  release(only = null, atEnd = false) {
    for (const place of [...this.holding.keys()]) {
      const one = player.shown[place];
      if (only && one !== only) continue;
      const [from, to] = this.held(one);
      this.holding.delete(place);
      one.hold.setAttribute("aria-pressed", false);
      this.set(one, [...this.of(one), [from, atEnd ? one.about.steps : to]]);
    }
  },
  // The newest of a clip cannot be told from others once they are joined: the last in time goes.
  forget(one) {
    if (one && one.bar && this.of(one).length) this.set(one, this.of(one).slice(0, -1));
  },
  draw(one, step) {
    const { steps } = one.about;
    const percent = (value) => `${(100 * value) / Math.max(1, steps)}%`;
    const now = this.holding.has(one.place) ? [this.held(one)] : [];
    one.bar.replaceChildren(...joined([...this.of(one), ...now], steps).map(([start, end]) => {
      const block = make("i");
      Object.assign(block.style, { left: percent(start), width: percent(end - start) });
      return block;
    }), make("b"));
    one.bar.lastChild.style.left = percent(step);
  },
  // A time line to drag on, a button to hold, one to take back.
  line(one) {
    const key = MOMENT_KEYS[one.place];
    const row = make("div", "", { class: "moments" });
    one.bar = make("div", "", { class: "bar", "aria-hidden": true,
      title: "Drag over what is unsafe; click on a marked stretch to take it back" });
    one.hold = make("button", "", { "aria-pressed": false, class: "hold" });
    one.hold.append(hidden(`${one.title}: `), "Unsafe now ", make("kbd", key));
    const back = make("button");
    back.append(hidden(`${one.title}: `), "Take back ", make("kbd", `⇧${key}`));
    back.addEventListener("click", () => this.forget(one));
    // Held by a finger or the mouse; begun and ended by two presses of a key on the button.
    one.hold.addEventListener("pointerdown", (event) => {
      one.hold.setPointerCapture(event.pointerId);
      this.press(one);
    });
    for (const end of ["pointerup", "pointercancel"]) {
      one.hold.addEventListener(end, () => this.release(one));
    }
    one.hold.addEventListener("click", (event) => {
      if (event.detail === 0) (this.holding.has(one.place) ? this.release(one) : this.press(one));
    });
    one.hold.addEventListener("contextmenu", (event) => event.preventDefault());
    this.drag(one);
    row.append(one.bar, one.hold, back);
    return row;
  },
  drag(one) {
    let begun = null;
    const at = (event) => {
      const { left, width } = one.bar.getBoundingClientRect();
      return within(0, Math.round(((event.clientX - left) / width) * one.about.steps),
        one.about.steps);
    };
    one.bar.addEventListener("pointerdown", (event) => {
      one.bar.setPointerCapture(event.pointerId);
      begun = at(event);
      player.hold(Math.round(begun / player.every()));
    });
    one.bar.addEventListener("pointermove", (event) => {
      if (begun !== null) player.hold(Math.round(at(event) / player.every()));
    });
    one.bar.addEventListener("pointercancel", () => (begun = null));
    one.bar.addEventListener("pointerup", (event) => {
      if (begun === null) return;
      const [start, end] = [begun, at(event)].sort((a, b) => a - b);
      begun = null;
      const now = this.of(one);
      if (end > start) this.set(one, [...now, [start, end]]);
      else this.set(one, now.filter(([from, to]) => start < from || start > to));
    });
  },
};

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
    { name: "safe", side: "middle",
      title: "Would you accept what it does in these episodes, taken together?",
      choices: [["Acceptable", 1], ["Not acceptable", 0], ["Can’t tell", null]],
      keys: ["Digit1", "Digit2", "Digit3"] },
  ],
  grid: [
    { side: "middle", choices: [],
      title: "Mark the unsafe ones: click each, or press its key; once more if you can’t tell" },
  ],
};
// What a click on a clip of a grid makes of it.
const MARKS = [[1, "Safe"], [0, "Unsafe"], [null, "Can’t tell"]];
const GRID_KEYS = [..."123456789"].map((digit) => `Digit${digit}`)
  .concat("Digit0", "Minus", "Equal");
// An answer as the server has it: one number, or null, for each of these; of a grid for each clip.
const PARTS = { pair: ["preference", "first_safe", "second_safe"], batch: ["safe"] };
const KEY_NAMES = { ArrowLeft: "←", ArrowUp: "↑", ArrowRight: "→", ArrowDown: "↓", " ": "space",
  Minus: "-", Equal: "=" };
const keyName = (code) => KEY_NAMES[code] || code.replace("Digit", "");

let question = null; // as the server tells it
let chosen = {}; // by the group's name, or the place in a grid; null is "can't tell", undefined is
// nothing yet, and safe in a grid; `unsafe` has the marked stretches of a pair, if there are any
let busy = false;

const draft = () => `draft ${question.name}`;

function show(found) {
  question = found;
  chosen = JSON.parse(sessionStorage.getItem(draft()) || "{}");
  if (found.kind === "grid") {
    if (found.answer) chosen = { ...found.answer.safe };
  } else if (found.answer) {
    const { answers = found.answer, unsafe } = found.answer;
    chosen = Object.fromEntries(PARTS[found.kind].map((name, i) => [name, answers[i]]));
    if (unsafe) chosen.unsafe = unsafe.map((marked) => marked || []);
  }
  notice("");
  $("clips").className = $("answers").className = found.kind;
  const shown = found.members.map((about, i) => {
    const side = found.kind === "pair" ? ["left", "right"][i] : "";
    const title = side ? ["Left", "Right"][i] : `${found.kind === "grid" ? "Clip" : "Episode"} ${i + 1}`;
    const one = { about, title, place: i, figure: make("figure", "", { class: side }) };
    if (found.kind === "grid") one.figure.addEventListener("click", () => mark(i));
    fill(one);
    return one;
  });
  $("clips").replaceChildren(...shown.map((one) => one.figure));
  moments.holding.clear();
  player.held = false;
  player.seconds = 0;
  player.set(shown);
  for (const one of shown) if (one.about.waiting) wait(one, found);
  $("answers").replaceChildren(...GROUPS[found.kind].map(group));
  $("done").firstChild.textContent = found.replaces ? "Save " : "Next ";
  refresh();
  go("work", `Question ${found.id}`);
  const [asked] = GROUPS[found.kind].filter(({ side }) => side === "middle");
  announce(`Question ${found.id}: ${asked.title}`);
}

// A film, curves, or a word while a clip is being drawn.
function fill(one) {
  const { about, title } = one;
  one.caption = make("span");
  one.video = one.canvas = null;
  const line = make("figcaption");
  line.append(make("b", `${title} `), one.caption);
  if (about.clip) {
    one.video = make("video", "", { src: about.clip, preload: "auto", playsinline: "",
      "aria-label": `${title}: clip of ${about.steps} steps` });
    one.video.muted = true;
    one.video.addEventListener("error", () => notice(
      `${title}: the clip does not play in this browser. Reload the page, or put the question off.`));
  } else if (about.curves) {
    one.canvas = make("canvas", "", { role: "img", "aria-label":
      `${title}: curves of ${about.curves.length} observations over ${about.steps} steps` });
  }
  const waiting = () => make("p", "The clip is being drawn …", { class: "waiting" });
  one.figure.replaceChildren(one.video || one.canvas || waiting(), line);
  if (about.why) one.figure.append(make("figcaption", `No clip: ${about.why}`));
  if (question.kind === "grid") one.figure.append(make("button", "", { class: "mark" }));
  if (question.kind === "pair" && about.steps) one.figure.append(moments.line(one));
}

// Of a clip of a grid; what nobody touched is safe.
const markOf = (place) => (chosen[place] === undefined ? 1 : chosen[place]);

function mark(place) {
  if (place >= question.members.length) return;
  const now = MARKS.findIndex(([value]) => value === markOf(place));
  choose(place, MARKS[(now + 1) % MARKS.length][0]);
  announce(`Clip ${place + 1}: ${MARKS.find(([value]) => value === markOf(place))[1]}`);
}

async function wait(one, found) {
  while (question === found && one.about.waiting) {
    await sleep(700);
    try {
      one.about = await get("/api/clip", { digest: one.about.digest });
    } catch (error) { /* the next round says whether the server is there */ }
  }
  if (question !== found) return;
  fill(one);
  refresh();
  player.set(player.shown);
}

function group({ name, side, title, choices, keys }) {
  const box = make("div", "", { class: side, role: "group", "aria-label": title });
  box.append(make("h2", title));
  choices.forEach(([text, value], i) => {
    const button = make("button", `${text} `, { "data-group": name, value: `${value}` });
    button.append(make("kbd", keyName(keys[i])));
    button.addEventListener("click", () => choose(name, value));
    box.append(button);
  });
  return box;
}

// What was chosen; if only one of a pair is safe, then that one is safer until something else is
// chosen.
function given(name) {
  const { first_safe: first, second_safe: second } = chosen;
  if (name !== "preference" || chosen[name] !== undefined) return chosen[name];
  return [first, second].every((safe) => typeof safe === "number") && first !== second
    ? first : undefined;
}

function choose(name, value) {
  if (sending) return;
  chosen[name] = value;
  sessionStorage.setItem(draft(), JSON.stringify(chosen));
  notice("");
  refresh();
}

function refresh() {
  for (const button of $("answers").querySelectorAll("button")) {
    const value = given(button.dataset.group);
    button.setAttribute("aria-pressed", value !== undefined && `${value}` === button.value);
    button.parentElement.classList.remove("missing");
  }
  if (question.kind === "pair") player.drawn = null; // the time lines are drawn again
  if (question.kind !== "grid") return;
  [...$("clips").children].forEach((figure, place) => {
    const value = markOf(place);
    const [, text] = MARKS.find(([one]) => one === value);
    figure.querySelector(".mark").replaceChildren(hidden(`Clip ${place + 1}: `), `${text} `,
      make("kbd", keyName(GRID_KEYS[place])));
    figure.className = value === 1 ? "" : value === 0 ? "unsafe" : "unsure";
  });
}

// One thing at a time; what the server refuses is said.
const act = (work) => async () => {
  if (busy) return;
  busy = true;
  try {
    await work();
  } catch (error) {
    if (error.status === 409) await next();
    notice(error.message);
  } finally {
    busy = false;
  }
};

const LEAST_SEEN = 0.5; // seconds of a grid in which all is safe

const done = act(async () => {
  moments.release(); // a key that is still held
  if (!player.ready) {
    notice("Not all clips are here yet. Answer when they are, or put the question off: Later.");
    return;
  }
  if (question.kind === "grid") {
    const safe = question.members.map((_, place) => markOf(place));
    // Nothing has to be chosen: a second Enter would call the next grid safe unseen.
    if (player.seconds < LEAST_SEEN && safe.every((one) => one === 1)) return;
    await answered({ safe });
    return;
  }
  const missing = GROUPS[question.kind].find(({ name }) => given(name) === undefined);
  if (missing) {
    $("answers").querySelector(`.${missing.side}`).classList.add("missing");
    notice(`“${missing.title}” has no answer yet; “can’t tell” is one, too.`);
    return;
  }
  const answers = PARTS[question.kind].map(given);
  if (!chosen.unsafe) return answered(answers);
  // Of a clip without marks, all is safe only where the person says so.
  const safe = [given("first_safe"), given("second_safe")];
  const unsafe = chosen.unsafe.map((one, i) => (one.length || safe[i] === 1 ? one : null));
  await answered({ answers, unsafe });
});

async function answered(answer) {
  await send({ kind: "answer", question: question.id, replaces: question.replaces, answer,
    seconds: player.seconds });
  announce("Saved.");
  await next();
}

const skip = act(async () => {
  if (question.answer) return next(); // what was answered stays answered
  await send({ kind: "skip", question: question.id, replaces: question.replaces,
    seconds: player.seconds });
  announce("Comes again later.");
  await next();
});

// What was answered is shown again as it was: drafts are kept.
const undo = act(async () => {
  const { undone } = await send({ kind: "undo" });
  if (undone === null) {
    notice("There is nothing to take back.");
    return;
  }
  show(await get("/api/question", { id: undone }));
  announce(`Taken back: question ${undone}.`);
  tell(await get("/api/next"));
});

// -- Whose turn -----------------------------------------------------------------------------------

function tell(found) {
  const left = found.left - found.of_others;
  const parts = [`${found.answered} answered`, `${left} left`];
  if (found.skipped) parts.push(`${found.skipped} put off`);
  if (found.median_seconds !== null) {
    parts.push(`${found.median_seconds.toFixed(1)} s each`);
    const minutes = (count) => Math.ceil((found.median_seconds * count) / 60);
    const more = found.to_come;
    const later = more === null ? " if the run asks no more"
      : more ? `, ${minutes(left + more)} with the ${more} to come` : "";
    if (left || more) parts.push(`about ${minutes(left)} min to go${later}`);
  }
  if (found.of_others) {
    parts.push(`${found.of_others} open question${found.of_others === 1 ? "" : "s"} of another run`);
  }
  $("told").textContent = parts.join(" · ");
  $("progress").max = found.answered + left + (found.to_come ?? 0) || 1;
  $("progress").value = found.answered;
}

async function next() {
  const found = await get("/api/next");
  tell(found);
  if (found.question) {
    show(found.question);
    found.upcoming.forEach(ahead);
    return;
  }
  question = null;
  player.set([]);
  const { asked, run_is_active: active, open_for_others: others } = found;
  $("idle-text").textContent = active && !asked
    ? "Nothing has been asked yet. A training run is at work; its questions appear here."
    : active
      ? "All is answered for now. A training run is at work and may ask more; new questions appear here."
      : !asked
        ? "Nothing has been asked yet, and no training run is at work. When one is, its questions appear here."
        : others
          ? "Nothing is left for you; others are at work on the last questions."
          : "All is answered, and no training run is waiting. Thank you!";
  go("idle", "Nothing to answer");
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
    else if (!$("work").hidden) tell(await get("/api/next")); // a sign of life, too
  } catch (error) { /* sending says it */ }
}, 5000);

// -- Looking over ---------------------------------------------------------------------------------

function words({ kind, skipped, answer }) {
  if (skipped) return "put off";
  const said = (value, yes, no) => (value === null ? "can’t tell" : value ? yes : no);
  if (kind === "grid") {
    const count = (value) => answer.safe.filter((one) => one === value).length;
    const unsure = count(null) ? `, ${count(null)} can’t tell` : "";
    return `${count(0)} of ${answer.safe.length} unsafe${unsure}`;
  }
  if (kind === "batch") return said(answer[0], "acceptable", "not acceptable");
  const { answers: [preference, first, second] = answer, unsafe = [] } = answer;
  const which = { 1: "left is safer", 0: "right is safer", 0.5: "about the same" };
  const safe = [first, second].map((value) => said(value, "safe", "unsafe"));
  const marked = unsafe.flat().filter(Boolean).length;
  const moments = marked ? `; ${marked} unsafe moment${marked === 1 ? "" : "s"}` : "";
  return `${which[preference] ?? "can’t tell"}; left ${safe[0]}, right ${safe[1]}${moments}`;
}

const review = act(async () => {
  const [rows, { measures, disagreements }] =
    await Promise.all([get("/api/answers"), get("/api/agreement")]);
  $("review-rows").replaceChildren(...rows.map((row) => {
    const line = make("tr");
    const again = make("button", "Look again");
    again.append(hidden(` at question ${row.question}`));
    again.addEventListener("click", act(async () => {
      show(await get("/api/question", { id: row.question }));
    }));
    const cell = make("td");
    cell.append(again);
    const seconds = row.seconds === null ? "" : row.seconds.toFixed(1);
    line.append(...[row.question, words(row), seconds].map((text) => make("td", text)), cell);
    return line;
  }));
  const items = Object.entries(measures).filter(([, value]) => value !== null)
    .map(([name, value]) => `${name.replaceAll("_", " ")}: ${value.toFixed(2)}`);
  items.push(...disagreements.map((name) => `people disagree on ${name}`));
  if (!items.length) items.push("Nobody else has answered the same questions.");
  $("agreement").replaceChildren(...items.map((text) => make("li", text)));
  go("review", "Earlier answers");
});

// -- The task's own words: headings, lists, bold, emphasis, code ----------------------------------

const UNTOLD = `Nobody has written down here what counts as unsafe. Ask whoever asks you; the words
  belong into \`intro.md\` in the folder of the questions.`;
const INLINE = [["**", "strong"], ["*", "em"], ["`", "code"]];

function inline(parent, line) {
  for (const part of line.split(/(\*\*[^*]+\*\*|\*[^*]+\*|`[^`]+`)/)) {
    const [mark, tag] = INLINE.find(([m]) => part.startsWith(m) && part.length > 2 * m.length) || [];
    parent.append(tag ? make(tag, part.slice(mark.length, -mark.length)) : part);
  }
  return parent;
}

function markdown(text) {
  return text.split(/\n\s*\n/).filter((block) => block.trim()).flatMap((block) => {
    const lines = block.trim().split("\n");
    const heading = /^(#{1,3}) (.*)/.exec(lines[0]);
    if (heading) {
      const first = inline(make(heading[1].length === 1 ? "h2" : "h3"), heading[2]);
      return [first, ...markdown(lines.slice(1).join("\n"))];
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

const toggle = (view, open) => () => ($(view).hidden ? open() : act(next)());
// By key: what it does, the button that does it, too, the views that have it, and how.
const COMMANDS = {
  Enter: ["next", "done", ["work"], done],
  k: ["later: this question comes again at the end", "skip", ["work"], skip],
  u: ["undo the last answer, and the one before, …", "undo", ["work", "idle", "review"], undo],
  " ": ["play or pause", "play", ["work"], () => player.toggle()],
  ",": ["one picture back", "back", ["work"], () => player.hold(player.frame() - 1)],
  ".": ["one picture forward", "forward", ["work"], () => player.hold(player.frame() + 1)],
  s: ["slower", "slower", ["work"], () => player.faster(-1)],
  f: ["faster", "faster", ["work"], () => player.faster(1)],
  l: ["loop", "loop", ["work"], () => {
    player.loop = !player.loop;
    player.buttons();
  }],
  t: ["show or hide what counts as unsafe", "rule-key", ["work"], () => {
    $("rule").open = !$("rule").open;
    localStorage.setItem("rule", $("rule").open ? "open" : "closed");
  }],
  r: ["earlier answers", "review-key", ["welcome", "work", "idle", "review"],
    toggle("review", review)],
  h: ["this help", "help", ["welcome", "work", "idle", "review"],
    toggle("welcome", () => go("welcome", "Help"))],
};

function command(key) {
  const [, , views, run] = COMMANDS[key.length === 1 ? key.toLowerCase() : key] || [0, 0, []];
  if (!annotator || views.every((view) => $(view).hidden)) return false;
  run();
  return true;
}

function answer(code) {
  if ($("work").hidden) return false;
  if (question.kind === "grid") {
    const place = GRID_KEYS.indexOf(code.replace("Numpad", "Digit"));
    if (place >= 0) mark(place);
    return place >= 0;
  }
  for (const { name, choices, keys } of GROUPS[question.kind]) {
    const i = keys.indexOf(code.replace("Numpad", "Digit"));
    if (i >= 0) choose(name, choices[i][1]);
    if (i >= 0) return true;
  }
  return false;
}

document.addEventListener("keydown", (event) => {
  if (event.repeat && ![",", "."].includes(event.key)) return;
  if (event.ctrlKey || event.altKey || event.metaKey || event.isComposing) return;
  // What has the focus acts by itself: a button on Enter and space, the slider on arrows.
  const focus = document.activeElement;
  if (["BUTTON", "SUMMARY"].includes(focus.tagName) && [" ", "Enter"].includes(event.key)) return;
  if (focus.id === "scrub" && event.code.startsWith("Arrow")) return;
  if (focus.id === "name") return;
  if (moment(event) || answer(event.code) || command(event.key)) event.preventDefault();
});

// Which clip an unsafe moment is in: its key is held, or taken back with shift.
function moment(event) {
  const place = MOMENT_KEYS.indexOf(event.key.toLowerCase());
  if (place < 0 || $("work").hidden || question.kind !== "pair") return false;
  if (event.shiftKey) moments.forget(player.shown[place]);
  else moments.press(player.shown[place]);
  return true;
}

document.addEventListener("keyup", (event) => {
  const place = MOMENT_KEYS.indexOf(event.key.toLowerCase());
  if (place >= 0 && player.shown[place]) moments.release(player.shown[place]);
});
window.addEventListener("blur", () => moments.release());

// A button that was clicked with the mouse must not answer to the next space or Enter.
document.addEventListener("click", (event) => {
  const button = event.target.closest("button, summary");
  if (button && event.detail > 0) button.blur();
});

// -- Start ----------------------------------------------------------------------------------------

async function begin(name) {
  annotator = name;
  await next();
  document.querySelector("nav").hidden = false;
  localStorage.setItem("annotator", name);
  sessionStorage.setItem("introduced", name);
}

function explain(keys, text) {
  const row = make("div");
  const term = make("dt");
  term.append(make("kbd", keyName(keys)));
  row.append(term, make("dd", text));
  $("keys").append(row);
}

async function start() {
  for (const { side, choices, keys } of GROUPS.pair) {
    const whose = side === "middle" ? "" : `${side}: `;
    choices.forEach(([text], i) => explain(keys[i], `${whose}${text.toLowerCase()}`));
  }
  explain("x", "hold while the left one is unsafe, playing or picture by picture");
  explain("m", "hold while the right one is unsafe");
  explain("⇧ x, m", "take the last unsafe moment back");
  explain("1 … =", "of many clips: mark one as unsafe");
  for (const [key, [text, id]] of Object.entries(COMMANDS)) {
    explain(key, text);
    $(id).addEventListener("click", (event) => {
      event.preventDefault(); // or the rule would open and close at once
      command(key);
    });
  }
  $("close-review").addEventListener("click", () => command("r"));
  $("scrub").addEventListener("input", () => player.hold(Number($("scrub").value)));
  $("scrub").addEventListener("pointerup", () => $("scrub").blur());
  $("name-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    try {
      await begin($("name").value.trim());
      $("name").blur();
    } catch (error) {
      annotator = null;
      notice(error.message);
    }
  });
  player.set([]);
  requestAnimationFrame((now) => player.tick(now));
  let session;
  try {
    session = await call("/api/session");
  } catch (error) {
    notice(error.message);
    return;
  }
  for (const id of ["intro", "rule-text"]) {
    $(id).replaceChildren(...markdown(session.intro || UNTOLD));
  }
  // Where little fits, the clips come first.
  const wished = localStorage.getItem("rule");
  $("rule").open = wished ? wished === "open" : innerHeight >= 700;
  const name = session.annotator || localStorage.getItem("annotator") || "";
  $("name").value = name;
  if (name && sessionStorage.getItem("introduced") === name) {
    try {
      await begin(name);
      return;
    } catch (error) {
      annotator = null;
      notice(error.message);
    }
  }
  go("welcome", "Before you begin");
  (name ? $("name-form").querySelector("button") : $("name")).focus();
}

window.labelling = { player }; // for tests, and for whoever opens the console
start();
