// Send image files with fetch, in Node 18 or later: node predict.mjs URL FILE...
// In a browser, pass a File or Blob as the body instead of the bytes that are read here.
import { readFile } from "node:fs/promises";

async function predict(url, image, { seconds = 10 } = {}) {
  const deadline = Date.now() + 1000 * seconds;
  for (;;) {
    const remaining = deadline - Date.now();
    const response = await fetch(`${url}/predict`, {
      method: "POST",
      headers: { "Content-Type": "application/octet-stream", "X-Request-Timeout": String(remaining / 1000) },
      body: image,
      signal: AbortSignal.timeout(remaining),
    });
    if (response.ok) return (await response.json()).results[0];
    const wait = 1000 * Number(response.headers.get("Retry-After"));
    if (![429, 503].includes(response.status) || Date.now() + wait >= deadline) {
      throw new Error((await response.json()).detail);
    }
    await response.arrayBuffer();
    await new Promise((resume) => setTimeout(resume, wait + 250 * Math.random()));
  }
}

const [url, ...files] = process.argv.slice(2);
for (const file of files) {
  const { prediction, ood, trust } = await predict(url, await readFile(file));
  console.log(file, "class", prediction.label, "flag", ood.flag, "accept", trust.accept);
}
