// The table of sampled rollouts. All text of prompts and responses is inserted as text, never as markup.
"use strict";

(function () {
  const table = document.getElementById("rollout-table");
  if (!table) return;

  const PAGE_SIZE = 20;
  const LEAST_LIKELY = -5; // the log-prob with the darkest shade
  const body = table.querySelector("tbody");
  const tooltip = document.getElementById("tooltip");
  const search = document.getElementById("search");
  const filters = ["step", "score", "finish"].map((name) => document.getElementById(`filter-${name}`));
  const [stepFilter, scoreFilter, finishFilter] = filters;
  const rollouts = page.rollouts.map((record) => ({
    ...record,
    haystack: `${record.prompt}\n${record.response}`.toLowerCase(),
  }));
  const scores = rollouts.map((record) => record.score).filter((score) => score !== null);
  const lowest = Math.min(...scores);
  const highest = Math.max(...scores);
  let sort = { key: "step", descending: true };
  let numShown = PAGE_SIZE;

  function level(score) {
    if (score === null) return "failed";
    if (highest === lowest) return "middle";
    const share = (score - lowest) / (highest - lowest);
    return share > 0.75 ? "high" : share < 0.25 ? "low" : "middle";
  }

  function matches(record) {
    const wanted = search.value.trim().toLowerCase();
    if (wanted && !record.haystack.includes(wanted)) return false;
    if (stepFilter.value !== "" && record.step !== Number(stepFilter.value)) return false;
    if (finishFilter.value && record.finish !== finishFilter.value) return false;
    if (scoreFilter.value === "failed") return record.score === null;
    if (!scoreFilter.value) return true;
    if (record.score === null) return false;
    const upper = record.score > (lowest + highest) / 2;
    return upper === (scoreFilter.value === "high");
  }

  function compare(one, other) {
    const [a, b] = [one[sort.key], other[sort.key]];
    if (a === null || b === null) return (a === null) - (b === null);
    return sort.descending ? b - a : a - b;
  }

  function show() {
    const chosen = rollouts.filter(matches).sort(compare);
    body.replaceChildren();
    for (const record of chosen.slice(0, numShown)) body.appendChild(row(record));
    document.getElementById("rollout-count").textContent = `${chosen.length} of ${rollouts.length}`;
    document.getElementById("more").hidden = chosen.length <= numShown;
    for (const head of table.querySelectorAll("th[data-key]")) {
      const direction = sort.descending ? "descending" : "ascending";
      head.setAttribute("aria-sort", head.dataset.key === sort.key ? direction : "none");
    }
  }

  function cell(line, className, label, text) {
    const node = element("td", className, line, text);
    if (label) node.dataset.label = label;
    return node;
  }

  function row(record) {
    const line = element("tr", "rollout");
    line.tabIndex = 0;
    line.setAttribute("aria-expanded", "false");
    cell(line, "number", "step", String(record.step));
    const shownScore = record.score === null ? record.status : formatNumber(record.score);
    element("span", `pill ${level(record.score)}`, cell(line, "number", "score"), shownScore);
    cell(line, "number", "adv.", signed(record.advantage));
    const ended = record.finish === "length" ? " (cut)" : "";
    cell(line, "number", "tokens", record.length + ended);
    const asked = element("div", "excerpt", cell(line, "wide prompt"));
    thumbnails(asked, record.pictures.slice(0, 1));
    asked.append(plain(record.prompt));
    element("div", "excerpt", cell(line, "wide"), record.response);
    line.addEventListener("click", () => toggle(line, record));
    line.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") {
        event.preventDefault();
        toggle(line, record);
      }
    });
    return line;
  }

  // The rendered chat template without its control tokens and role names, for the one-line excerpt.
  function plain(prompt) {
    return prompt.replace(/<\|im_start\|>(system|user|assistant)?|<\|[a-z_]+\|>/g, " ").replace(/\s+/g, " ").trim();
  }

  function thumbnails(parent, pictures) {
    pictures.forEach((picture, index) => {
      const image = element("img", "thumbnail", parent);
      image.alt = `picture ${index + 1} of the prompt`;
      image.src = picture;
    });
  }

  function signed(value) {
    if (value === null || value === undefined) return "\u2013";
    return (value > 0 ? "+" : "") + formatNumber(value);
  }

  function toggle(line, record) {
    const open = line.getAttribute("aria-expanded") === "true";
    line.setAttribute("aria-expanded", String(!open));
    if (open) line.nextSibling.remove();
    else line.after(detail(record));
  }

  function detail(record) {
    const line = element("tr", "detail");
    const holder = element("td", "", line);
    holder.colSpan = 6;
    const columns = element("div", "columns", holder);
    const left = element("div", "", columns);
    element("h3", "", left, "Prompt");
    if (record.pictures.length) thumbnails(element("div", "pictures", left), record.pictures);
    element("pre", "text", left, record.prompt);
    left.appendChild(facts(record));
    const right = element("div", "", columns);
    element("h3", "", right, record.spans.length ? "Conversation" : "Response");
    right.appendChild(record.spans.length ? conversation(record) : response(record));
    if (record.logp.length) {
      const scale = element("div", "scale", right, "certain");
      element("i", "", scale);
      scale.append("unlikely");
      if (record.spans.length) element("span", "", scale, "\u00b7 what the policy drew is in colour; only it is trained on");
    }
    return line;
  }

  function facts(record) {
    const list = element("dl", "facts");
    const entries = [
      ["ground truth", asText(record.truth)],
      ["data source", record.source],
      ["ended", record.finish === "length" ? "cut at the length limit" : "stopped by itself"],
      ["sample", `${record.id} from weights version ${record.version}`],
      ["mean log-prob", record.logp.length ? formatNumber(mean(record.logp.filter((value) => value !== null))) : null],
      ...course(record.episode),
      ["reward failed", record.score === null ? record.detail || record.status : null],
      ...Object.entries(record.extra).map(([name, value]) => [name, asText(value)]),
    ];
    for (const [name, value] of entries) {
      if (value === null || value === undefined || value === "") continue;
      element("dt", "", list, name);
      element("dd", "", list, value);
    }
    return list;
  }

  function course(episode) {
    if (!episode) return [];
    const counts = new Map();
    for (const outcome of episode.calls) counts.set(outcome, (counts.get(outcome) || 0) + 1);
    const calls = [...counts].map(([outcome, count]) => `${count} ${outcome.replace("_", " ")}`).join(", ");
    return [
      ["episode ended", episode.detail ? `${episode.end}: ${episode.detail}` : episode.end],
      ["calls", calls || "none"],
      ["waited for tools", `${formatNumber(episode.wait_s)} s`],
      ["forks", episode.forks.join(", ")],
    ];
  }

  function asText(value) {
    if (value === null || typeof value === "string") return value;
    return typeof value === "number" ? formatNumber(value) : JSON.stringify(value);
  }

  function mean(values) {
    return values.reduce((sum, value) => sum + value, 0) / values.length;
  }

  function response(record) {
    const text = element("pre", "text");
    if (!record.logp.length) {
      text.textContent = record.response;
      return text;
    }
    addTokens(text, record, 0, record.tokens.length);
    if (record.tokens.length < record.length) {
      element("span", "quiet", text, ` ... ${record.length - record.tokens.length} more tokens`);
    }
    return watched(text, record);
  }

  // The turns of an episode, one below the other: what the policy drew, and what it was given.
  // Branches of a conversation that forked have a mark between them, and their turns have numbers.
  function conversation(record) {
    const text = element("div", "text conversation");
    const branches = record.spans.filter((span) => span.follows !== undefined).length;
    let begin = 0;
    let branch = 1;
    for (const [index, span] of record.spans.entries()) {
      if (span.follows !== undefined) {
        const forks = record.episode.forks;
        const reason = forks.length === branches ? ` (${forks[branch - 1]})` : "";
        const place = span.follows < 0 ? "the prompt" : `part ${span.follows + 1}`;
        branch += 1;
        element("div", "fork", text, `branch ${branch}: parts from the conversation after ${place}${reason}`);
      }
      const number = branches ? `${index + 1} \u00b7 ` : "";
      const end = begin + span.num_tokens;
      const turn = element("section", span.drawn ? "turn drawn" : "turn given", text);
      const wait = span.wait_s === undefined ? "" : `, after ${formatNumber(span.wait_s)} s`;
      element("h4", "", turn, `${number}${span.role} \u00b7 ${span.num_tokens} token${span.num_tokens === 1 ? "" : "s"}${wait}`);
      const body = element("pre", "", turn);
      addTokens(body, record, begin, Math.min(end, record.tokens.length));
      if (end > record.tokens.length) {
        const left = end - Math.max(begin, record.tokens.length);
        element("span", "quiet", body, ` ... ${left} more tokens`);
      }
      begin = end;
    }
    return watched(text, record);
  }

  function addTokens(parent, record, begin, end) {
    for (let index = begin; index < end; index += 1) {
      const logp = record.logp[index];
      if (logp === null || logp === undefined) {
        parent.append(record.tokens[index]);
        continue;
      }
      const node = element("span", "token", parent, record.tokens[index]);
      const shade = Math.min(1, Math.max(0, logp / LEAST_LIKELY));
      node.style.background = `rgba(var(--heat), ${(0.8 * Math.sqrt(shade)).toFixed(3)})`;
      node.dataset.index = String(index);
    }
  }

  function watched(text, record) {
    text.addEventListener("pointerover", (event) => describe(event, record));
    text.addEventListener("pointerleave", hideTooltip);
    return text;
  }

  function describe(event, record) {
    if (!event.target.classList.contains("token")) return hideTooltip();
    const index = Number(event.target.dataset.index);
    const logp = record.logp[index];
    tooltip.replaceChildren();
    element("div", "", tooltip, `token ${index + 1}: ${JSON.stringify(record.tokens[index])}`);
    element("div", "", tooltip, `log-prob ${logp.toFixed(3)}, probability ${percent(Math.exp(logp))}`);
    tooltip.hidden = false;
    const box = event.target.getBoundingClientRect();
    const left = Math.min(box.left, window.innerWidth - tooltip.offsetWidth - 8);
    const above = box.top - tooltip.offsetHeight - 6;
    tooltip.style.left = `${Math.max(8, left)}px`;
    tooltip.style.top = `${above > 4 ? above : box.bottom + 6}px`;
  }

  function percent(share) {
    return share >= 0.0001 ? `${short(100 * share)} %` : `${(100 * share).toExponential(1)} %`;
  }

  function hideTooltip() {
    tooltip.hidden = true;
  }

  function restart() {
    numShown = PAGE_SIZE;
    hideTooltip();
    show();
  }

  for (const step of [...new Set(rollouts.map((record) => record.step))].sort((a, b) => a - b)) {
    element("option", "", stepFilter, `step ${step}`).value = String(step);
  }
  if (rollouts.every((record) => record.score !== null)) scoreFilter.querySelector('[value="failed"]').remove();
  search.addEventListener("input", restart);
  for (const filter of filters) filter.addEventListener("change", restart);
  for (const head of table.querySelectorAll("th[data-key]")) {
    head.querySelector("button").addEventListener("click", () => {
      const again = sort.key === head.dataset.key;
      sort = { key: head.dataset.key, descending: again ? !sort.descending : true };
      restart();
    });
  }
  document.getElementById("more").addEventListener("click", () => {
    numShown += PAGE_SIZE;
    show();
  });
  window.addEventListener("scroll", hideTooltip, { passive: true });
  show();
})();
