// Requests to the server. The cookie of the first request holds the token.

export async function get(path, params = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) {
    for (const item of Array.isArray(value) ? value : [value]) {
      if (item !== null && item !== undefined && item !== "") query.append(name, item);
    }
  }
  const answer = await fetch(`/api/${path}${query.size ? `?${query}` : ""}`, { credentials: "same-origin" });
  if (answer.ok) return answer.json();
  const text = await answer.text();
  let message = text;
  try {
    message = JSON.parse(text).error ?? text;
  } catch {
    // The refusals of the token and the host are plain text.
  }
  const error = new Error(message.trim() || `${answer.status} ${answer.statusText}`);
  error.status = answer.status;
  throw error;
}
