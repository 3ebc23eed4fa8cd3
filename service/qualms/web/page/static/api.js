// All requests of the page. Every one goes through `request`, so that headers can be added in one place.

export class ServiceError extends Error {
  constructor(title, detail, status) {
    super(detail || title);
    this.title = title;
    this.status = status;
  }
}

// The API key is kept in this variable only, and is gone when the page is closed or loaded again.
let key = "";

export function useKey(text) {
  key = text.trim();
}

export const hasKey = () => key !== "";

async function request(path, options = {}) {
  let response;
  const headers = key ? { ...options.headers, Authorization: `Bearer ${key}` } : options.headers;
  try {
    response = await fetch(path, { ...options, headers, credentials: "same-origin" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServiceError("The service cannot be reached", "Check that it is running, then try again.", 0);
  }
  if (response.ok) return response;
  const problem = await response.json().catch(() => ({}));
  let detail = problem.detail || `The service replied with the status ${response.status}.`;
  const retry = response.headers.get("Retry-After");
  if (retry) detail += ` Try again in ${retry} s.`;
  throw new ServiceError(problem.title || "The request failed", detail, response.status);
}

const json = async (path) => (await request(path)).json();

export const models = async () => (await json("models")).models;
export const calibration = (name) => json(`models/${encodeURIComponent(name)}/calibration`);
export const status = () => json("status");
export const file = async (path) => (await request(path)).blob();

// The first model is the default one, which has the short path.
export function predictPath(model, isDefault, query) {
  const path = isDefault ? "predict" : `models/${encodeURIComponent(model.name)}/predict`;
  return `${path}?${new URLSearchParams(query)}`;
}

export async function predict(path, blob, signal) {
  const started = performance.now();
  const headers = { "Content-Type": contentType(blob) };
  const response = await request(path, { method: "POST", body: blob, headers, signal });
  const reply = await response.json();
  return { result: reply.results[0], digest: reply.model.digest, milliseconds: performance.now() - started, timing: timing(response) };
}

export const contentType = (blob) => (blob.type.startsWith("image/") ? blob.type : "application/octet-stream");

function timing(response) {
  const text = response.headers.get("Server-Timing") || "";
  return [...text.matchAll(/(\w+);dur=([\d.]+)/g)].map(([, name, value]) => [name, Number(value)]);
}
