// Names as they are made up: KIND-HOST-TAG, as in decode-0-gpu7-3fa29c. Pure.

const MADE_UP = /^((?:prefill|decode|worker|gateway|planner)(?:-\d+)?)-(.+)-([0-9a-f]{6})$/;

// {short, host, tag} of a name; of one that somebody gave, itself and no host.
export function partsOf(name) {
  const [, short, host, tag] = MADE_UP.exec(name) ?? [null, name, "", ""];
  return { short, host, tag };
}

export const rolesOf = (worker, by) => [...worker.roles].sort().reverse().join(by);

export const shortName = (name) => partsOf(name).short;

// Each name -> what tells it from the others on its host: `decode-0`, or `decode 3fa29c` where there are two.
export function distinct(names) {
  const known = names.map((name) => [name, partsOf(name)]);
  const seen = new Map();
  for (const [, { short, host }] of known) seen.set(`${short} ${host}`, (seen.get(`${short} ${host}`) ?? 0) + 1);
  return new Map(known.map(([name, { short, host, tag }]) => [name, { host, short: seen.get(`${short} ${host}`) > 1 && tag ? `${short} ${tag}` : short }]));
}
