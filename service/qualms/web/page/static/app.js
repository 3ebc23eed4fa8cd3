// The page: one state, requests in api.js, drawing in charts.js.

import * as api from "./api.js";
import { recent, score, simplex } from "./charts.js";
import { element, find, number, percent, words } from "./dom.js";
import { Pad } from "./pad.js";
import { isDigitModel, samplesOf } from "./samples.js";

const RELOAD_MILLISECONDS = 1000;
const STATUS_MILLISECONDS = 5000;
const STATUS_AGE_MILLISECONDS = 1100; // the service makes /status anew once a second
const SLIDE_MILLISECONDS = 150;
const GUARANTEES = {
  confident: "confident (95 % of calibrations)",
  marginal: "marginal (on average)",
  "by-class": "by class (confident for each)",
};
const TERMS = {
  softmax: "How spread the class probabilities are: the image lies between classes.",
  evidence: "How little support the meta-model finds for any class.",
  distance: "How far the features are from those of the training images.",
};

const page = { models: [], model: null, calibration: null, image: null, name: "", result: null, sending: null, url: null, fileName: "" };

async function start() {
  try {
    await loadModels();
  } catch (error) {
    showError(error);
    if (error.status === 401 || error.status === 403) {
      askForKey();
      return;
    }
  }
  if (!page.models.length) {
    setTimeout(start, RELOAD_MILLISECONDS);
    return;
  }
  find("key-form").hidden = true;
  hideError();
  showStatus();
}

// Load the models, and select the one of this name, or else the default one.
async function loadModels(name) {
  page.models = await api.models();
  if (!page.models.length) return;
  const model = page.models.find((one) => one.name === name) ?? page.models[0];
  find("model").replaceChildren(...page.models.map((one) => element("option", { value: one.name }, one.name)));
  find("model").value = model.name;
  find("model-choice").hidden = page.models.length < 2;
  choose(model);
}

async function choose(model) {
  Object.assign(page, { model, calibration: null, image: null, result: null });
  for (const id of ["result", "scores-block", "request-block", "point"]) find(id).hidden = true;
  find("empty").hidden = false;
  const { classes, calibration } = model;
  find("model-line").textContent = `${model.name} ${model.version} · ${classes.length.toLocaleString("en")} classes · calibrated on ${calibration.n.toLocaleString("en")} images`;
  find("digest").textContent = `Model digest ${model.digest.slice(0, 16)}.`;
  const digits = isDigitModel(model);
  find("pad-block").hidden = !digits;
  find("sample-hint").textContent = digits ? "Digits are drawn by the service; the others are unlike any digit." : "These are unlike the training images. Drop one of your own that shows one of the classes.";
  showSamples();
  try {
    const calibration = await api.calibration(model.name);
    if (page.model !== model) return; // another one was selected meanwhile
    page.calibration = calibration;
    showOperatingPoints();
    if (page.result) showScores(page.result);
  } catch (error) {
    if (page.model === model) showError(error);
  }
}

function showSamples() {
  const buttons = samplesOf(page.model, api.file).map((sample) => {
    const image = element("img", { alt: "" });
    const button = element("button", { type: "button", "aria-label": sample.name, title: sample.name, "aria-pressed": "false" }, image);
    const file = sample.file();
    file.then((blob) => (image.src = URL.createObjectURL(blob)), () => button.remove());
    image.addEventListener("load", () => URL.revokeObjectURL(image.src), { once: true });
    button.addEventListener("click", async () => {
      use(await file, sample.name);
      button.setAttribute("aria-pressed", "true");
    });
    return button;
  });
  find("samples").replaceChildren(...buttons);
}

const points = () => page.calibration.operating_points.filter((one) => one.guarantee === find("guarantee").value);
const point = () => points()[Number(find("rate").value)];

function showOperatingPoints() {
  const { operating_points, guarantee } = page.calibration;
  const names = [...new Set(operating_points.map((one) => one.guarantee))];
  find("guarantee").replaceChildren(...names.map((name) => element("option", { value: name }, GUARANTEES[name] ?? name)));
  find("guarantee").value = guarantee;
  find("point").hidden = !names.length;
  if (names.length) selectRate(page.calibration.target_fpr);
}

// Move the slider to the supported rate that is nearest to `rate`.
function selectRate(rate) {
  const rates = points().map((one) => one.target_fpr);
  find("rate").max = rates.length - 1;
  const distance = (one) => Math.abs(Math.log(one / rate));
  find("rate").value = rates.reduce((best, one, index) => (distance(one) < distance(rates[best]) ? index : best), 0);
  showRate();
}

function showRate() {
  const text = `at most ${percent(point().target_fpr)}`;
  find("rate-text").textContent = text;
  find("rate").setAttribute("aria-valuetext", text);
}

function use(blob, name) {
  const fileName = blob.name ?? `${name.toLowerCase().replaceAll(" ", "-")}.png`;
  Object.assign(page, { image: blob, name, fileName });
  for (const button of find("samples").children) button.setAttribute("aria-pressed", "false");
  if (page.url) URL.revokeObjectURL(page.url);
  page.url = URL.createObjectURL(blob);
  send().then(() => matchMedia("(max-width: 860px)").matches && find("verdict-panel").scrollIntoView());
}

function query() {
  const values = { alpha: "top10" };
  if (page.model.flag_terms.length) values.explain = "true";
  const chosen = page.calibration && point();
  if (chosen && (chosen.target_fpr !== page.calibration.target_fpr || chosen.guarantee !== page.calibration.guarantee)) {
    Object.assign(values, { target_fpr: chosen.target_fpr, guarantee: chosen.guarantee });
  }
  return values;
}

async function send(isRepeated = false) {
  if (!page.image || !page.model) return;
  page.sending?.abort();
  const sending = (page.sending = new AbortController());
  find("result").classList.add("busy");
  const path = api.predictPath(page.model, page.model === page.models[0], query());
  try {
    const reply = await api.predict(path, page.image, sending.signal);
    if (reply.digest !== page.model.digest) {
      await sendToOtherModel(isRepeated);
      return;
    }
    hideError();
    show(reply, path);
    setTimeout(showStatus, STATUS_AGE_MILLISECONDS);
  } catch (error) {
    if (error.name === "AbortError") return;
    for (const id of ["result", "scores-block", "request-block"]) find(id).hidden = true;
    find("empty").hidden = true;
    showError(error);
    if (error.status === 401) askForKey();
  } finally {
    if (page.sending === sending) find("result").classList.remove("busy");
  }
}

// The service was started again with another model: the thresholds and classes of this page are those of the former one.
async function sendToOtherModel(isRepeated) {
  if (isRepeated) throw new api.ServiceError("The model of the service has changed", "Load this page again.", 0);
  const { image, name, fileName, model } = page;
  await loadModels(model.name);
  Object.assign(page, { image, name, fileName });
  await send(true);
}

function show({ result, milliseconds, timing }, path) {
  page.result = result;
  find("empty").hidden = true;
  for (const id of ["result", "scores-block", "request-block"]) find(id).hidden = false;
  find("sent").src = page.url;
  find("sent").alt = page.name ? `The image that was sent: ${page.name}` : "The image that was sent";
  find("label").textContent = result.prediction.label;
  find("probability").textContent = `probability ${percent(result.prediction.probability)}`;
  showVerdict(result);
  showAlpha(result.dirichlet);
  showTerms(result);
  showScores(result);
  find("curl").textContent = curl(path);
  for (const [name, value] of [["href", page.url], ["download", page.fileName]]) find("save").setAttribute(name, value);
  const parts = timing.map(([name, value]) => `${words(name)} ${number(value)} ms`).join(", ");
  find("time").textContent = `Took ${number(milliseconds)} ms${parts ? `; in the service: ${parts}` : ""}`;
}

function showVerdict({ ood, trust, prediction }) {
  const badge = (kind, text) => element("span", { class: `badge ${kind}` }, text);
  const flag = ood.flag ? badge("bad", "Flagged: unlike the training data") : badge("good", "Not flagged");
  const accept = trust.accept === null ? badge("warn", "No trust verdict") : trust.accept ? badge("good", "Accepted") : badge("warn", "Not accepted");
  find("badges").replaceChildren(flag, accept);
  find("sentence").textContent = sentence(ood, trust, prediction);
  find("guarantee-text").textContent = `Guarantee: ${ood.guarantee_text}.${trust.refusal ? ` ${trust.refusal}` : ""}`;
}

function sentence(ood, trust, prediction) {
  const n = ood.group ? ood.group.n : page.calibration?.n ?? page.model.calibration.n;
  const atLeast = Math.round(ood.p_value * (n + 1)) - 1;
  const count = n.toLocaleString("en");
  const rarer = atLeast <= 0 ? `rarer than all ${count} images` : `rarer than ${percent(1 - atLeast / n)} of the ${count} images`;
  const place = `The image is ${rarer} the model was calibrated on`;
  if (ood.flag) return `${place}: do not rely on “${prediction.label}”.`;
  if (trust.accept) return `${place}: nothing unusual, and “${prediction.label}” can be relied on at an error rate of ${percent(trust.target_risk)}.`;
  if (trust.accept === null) return `${place}: nothing unusual.`;
  return `${place}: not unusual enough to flag, but “${prediction.label}” is too uncertain to accept at an error rate of ${percent(trust.target_risk)}.`;
}

function bar(label, share, text, kind = "") {
  const fill = element("span", { class: `fill ${kind}` });
  fill.style.width = `${100 * Math.max(0, Math.min(1, share))}%`;
  return element("li", {}, element("span", {}, label), element("span", { class: "track" }, fill), element("span", {}, text));
}

function showAlpha({ top, precision }) {
  const largest = top[0].alpha;
  find("alpha").replaceChildren(...top.map((one) => bar(one.label, one.alpha / largest, number(one.alpha))));
  const more = page.model.classes.length - top.length;
  find("precision").textContent = `Precision α₀ = ${number(precision)}, the sum over all classes${more > 0 ? ` (${more.toLocaleString("en")} more are not shown)` : ""}.`;
  const three = top.slice(0, 3);
  simplex(find("simplex"), three);
  const rest = page.model.classes.length > 3 ? ` given that it is one of these ${three.length}` : "";
  find("simplex-text").textContent = `Class probabilities${rest}, on a logarithmic scale: a small spot is much evidence, an even field none. The ring is the mean.`;
}

function showTerms({ explanation }) {
  find("terms-block").hidden = !explanation;
  if (!explanation) return;
  const terms = Object.entries(explanation.flag_terms);
  const largest = Math.max(...terms.map(([, value]) => value));
  const scale = Math.max(largest, 3);
  const rows = terms.map(([name, value]) => {
    const row = bar(words(name), value / scale, `${number(value)} σ`, value === largest && page.result.ood.flag ? "largest" : "");
    if (TERMS[name]) row.append(element("span", { class: "note muted" }, TERMS[name]));
    return row;
  });
  find("terms").replaceChildren(...rows);
}

// Values by score; models of earlier versions have no explanation, but the reply has most scores.
function valuesOf({ explanation, uncertainty, ood, trust }) {
  if (explanation) return explanation.scores;
  const { total, epistemic, aleatoric } = uncertainty;
  return { ...total, ...epistemic, expected_entropy: aleatoric, [trust.score]: trust.value, [ood.score]: ood.value };
}

function showScores(result) {
  const { calibration } = page;
  find("scores-block").hidden = !calibration;
  if (!calibration) return;
  const values = valuesOf(result);
  const thresholds = point()?.thresholds ?? {};
  const rows = Object.entries(calibration.scores)
    .filter(([name]) => name in values)
    .map(([name, distribution]) => {
      const threshold = name === result.ood.score ? result.ood.threshold : (thresholds[name] ?? null);
      return score(name, values[name], distribution, calibration.levels, threshold, name === result.ood.score);
    });
  find("scores").replaceChildren(...rows);
}

// An argument of a shell command; quotes only where they are needed.
const quote = (text) => (/^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);

function curl(path) {
  const type = `Content-Type: ${api.contentType(page.image)}`;
  const key = api.hasKey() ? ` -H "Authorization: Bearer $QUALMS_API_KEY"` : "";
  const url = quote(String(new URL(path, document.baseURI)));
  return `curl --data-binary ${quote(`@${page.fileName}`)} -H ${quote(type)}${key} ${url}`;
}

async function showStatus() {
  let text = "";
  try {
    const status = await api.status();
    const model = status.models.find((one) => one.name === page.model?.name);
    if (!model) return;
    recent(find("recent"), model);
    const { rate, images, above_bound, interval_seconds } = model.recent;
    const total = images.reduce((a, b) => a + b, 0);
    const minutes = Math.round((images.length * interval_seconds) / 60);
    const bounds = `guaranteed for images like the calibration images: ${percent(model.target_fpr)} (dotted); alarm above ${percent(model.rate_bound)} (dashed)`;
    text = total ? `${percent(rate)} of ${total.toLocaleString("en")} ${total === 1 ? "image" : "images"} in the last ${minutes} minutes ${total === 1 ? "was" : "were"} flagged; ${bounds}.` : `No images in the last ${minutes} minutes; ${bounds}.`;
    find("recent-begin").textContent = `${minutes} minutes ago`;
    find("recent-ends").hidden = false;
    text += above_bound ? " More than chance explains: the images differ from the calibration images." : "";
    find("recent-text").classList.toggle("alarm", above_bound);
  } catch (error) {
    text = `${error.title ?? "Something went wrong on this page"}: ${error.message}`;
  }
  if (find("recent-text").textContent !== text) find("recent-text").textContent = text;
}

// The service needs a key; the page starts again when there is one.
function askForKey() {
  find("model-line").textContent = "This service needs an API key.";
  find("empty").hidden = true;
  find("key-form").hidden = false;
  find("key").focus();
}

function showError(error) {
  console.debug(error);
  const title = error instanceof api.ServiceError ? error.title : "Something went wrong on this page";
  find("error").replaceChildren(element("strong", {}, title), error.message);
  find("error").hidden = false;
}

function hideError() {
  find("error").hidden = true;
}

function listen() {
  find("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    api.useKey(find("key").value);
    find("key").value = "";
    start();
  });
  find("file").addEventListener("change", (event) => {
    if (event.target.files[0]) use(event.target.files[0], event.target.files[0].name);
    event.target.value = "";
  });
  document.addEventListener("paste", (event) => {
    const [file] = event.clipboardData.files;
    if (file) use(file, file.name);
  });
  for (const name of ["dragover", "dragleave", "drop"]) {
    document.addEventListener(name, (event) => {
      event.preventDefault();
      document.body.classList.toggle("over", name === "dragover");
      if (name === "drop" && event.dataTransfer.files[0]) use(event.dataTransfer.files[0], event.dataTransfer.files[0].name);
    });
  }
  let sliding;
  find("rate").addEventListener("input", () => {
    showRate();
    clearTimeout(sliding);
    sliding = setTimeout(() => send(), SLIDE_MILLISECONDS);
  });
  find("guarantee").addEventListener("change", () => {
    selectRate(page.calibration.target_fpr);
    send();
  });
  find("model").addEventListener("change", (event) => choose(page.models.find((one) => one.name === event.target.value)));
  const pad = new Pad(find("pad"), (blob) => use(blob, "your drawing"), (text) => (find("pad-pen").textContent = text));
  find("pad-clear").addEventListener("click", () => pad.clear());
  find("copy").addEventListener("click", copy);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => page.result && showAlpha(page.result.dirichlet));
  setInterval(() => document.visibilityState === "visible" && page.model && showStatus(), STATUS_MILLISECONDS);
}

async function copy() {
  try {
    await navigator.clipboard.writeText(find("curl").textContent);
    find("copy").textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(find("curl"));
    find("copy").textContent = "Selected; press Ctrl+C";
  }
  setTimeout(() => (find("copy").textContent = "Copy"), 2000);
}

listen();
start();
