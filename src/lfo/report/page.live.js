// The additions of `lfo watch` to the report page: the current state of runs, and updates every two seconds. Sections
// whose data have changed are drawn again.

// Now ---------------------------------------------------------------------------------------------------------------

const megabytes = (bytes) => `${plain.format(bytes / 2 ** 20)} MB`;

/** A card for each run: progress, speed, remaining time, process and warnings. */
function now() {
  const { runs, machine } = data.live;
  const node = section("now", "Now", null);
  if (!runs.length) return node.append(empty("No run has begun in these folders yet. This page shows it as soon as it does."));
  node.append(element("div", { class: "cards" }, runs.map((run, index) => {
    const { name, group } = data.runs[index];
    const all = run.phases.reduce((sum, [, seconds]) => sum + seconds, 0);
    const facts = [
      `step ${plain.format(run.step)}${run.steps === null ? "" : ` of ${plain.format(run.steps)}`}`, `${plain.format(run.tasks)} tasks`,
      run.success === null ? null : `val ${FORMATS.share(run.success)} at step ${run.success_step}`,
      all ? `${short(all)} s a step` : null, run.left === null ? null : `about ${duration(run.left)} left`,
      run.process && run.process.cpu !== null ? `CPU ${FORMATS.share(run.process.cpu)}` : null,
      run.process && run.process.memory !== null ? megabytes(run.process.memory) : null,
      run.process ? `process ${run.process.process}` : null];
    const done = element("progress", { max: run.steps || 1, value: run.step, "aria-label": `steps of ${name}` });
    return element("div", { class: `card ${group === null ? "" : colour(group)}` },
      element("h3", {}, group === null ? null : element("span", { class: "swatch" }), name, element("span", { class: "chip" }, run.state)), done,
      element("div", { class: "facts" }, facts.filter(Boolean).map((fact) => element("span", {}, fact))), all ? phaseBar(run.phases, all) : null,
      run.warnings.length ? element("ul", { class: "notices" }, run.warnings.map(({ step, words }) => element("li", {}, step === null ? words : `step ${step}: ${words}`))) : null);
  })));
  const use = [`${machine.cores} cores`, machine.load === null ? null : `load ${short(machine.load)}`,
    ...machine.gpus.map((gpu) => `${gpu.name}: ${FORMATS.share(gpu.use)}, ${megabytes(gpu.memory)} of ${megabytes(gpu.memory_total)}`)];
  node.append(element("p", { class: "quiet", id: "machine" }, `This machine: ${use.filter(Boolean).join("; ")}.`));
}

/** Where the time of a step goes. */
function phaseBar(phases, all) {
  const shares = phases.filter(([, seconds]) => seconds / all >= 0.005);
  const bar = element("div", { class: "phases", "aria-hidden": "true" }, shares.map(([, seconds], index) => {
    const part = element("span", { class: `p${Math.min(index, 4)}` });
    part.style.width = `${(100 * seconds) / all}%`;
    return part;
  }));
  return [bar, element("ul", { class: "legend" }, shares.map(([name, seconds], index) =>
    element("li", {}, element("i", { class: `p${Math.min(index, 4)}` }), `${name} ${FORMATS.share(seconds / all)}`)))];
}

// News ---------------------------------------------------------------------------------------------------------------

const stale = new Set(); // parts that have arrived but are not drawn yet

/** Whether the reader points at a chart of a section or has a list open: it is drawn again later. */
const busy = (id) => byId(id)?.querySelector(".chart:hover, select:focus");

function refresh() {
  head();
  const waiting = new Set();
  for (const [id, draw, parts] of SECTIONS) {
    if (!parts.some((part) => stale.has(part))) continue;
    if (busy(id)) parts.forEach((part) => waiting.add(part));
    else draw();
  }
  stale.clear();
  for (const part of waiting) stale.add(part);
}

async function askForNews() {
  let words = "";
  try {
    const answer = await fetch(`data?have=${data.version}`, { cache: "no-store" });
    if (!answer.ok) throw new Error(answer.statusText);
    const news = await answer.json();
    Object.assign(data, news);
    for (const part of Object.keys(news)) stale.add(part);
    stale.delete("version");
    refresh();
  } catch {
    words = "The server does not answer: it has ended or is busy. This page shows its last data; the runs do not depend on it.";
  }
  byId("lost").hidden = !words;
  byId("lost").textContent = words;
  setTimeout(askForNews, 1000 * data.live.every);
}

SECTIONS.unshift(["now", now, ["live", "groups"]]);
now();
byId("page").prepend(byId("now"));
byId("sections").prepend(byId("sections").lastChild);
byId("foot").before(element("p", { class: "notices", id: "lost", role: "status", hidden: true }));
setTimeout(askForNews, 1000 * data.live.every);
