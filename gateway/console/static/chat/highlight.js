// Code as runs of [kind, text], for the languages that models write most. Pure. Kinds: "" (plain), comment, string, number, word
// (keywords), call, name (keys, tags, attributes), add, del.

const C = "abstract as async await auto bool boolean break byte case catch char class const constexpr continue debugger default defer def delete do double dyn else enum export extends extern final finally float fn for foreach from func function go goto if impl implements import in inline instanceof int interface internal is let lock long loop match mod module mut namespace new nil null nullptr object of open operator out override package private protected pub public range readonly ref return sealed select self short signed sizeof static struct super switch template this throw throws trait true false try type typedef typeof undefined union unsafe unsigned use using val var virtual void volatile when where while with yield";
const WORDS = {
  c: C,
  python: "and as assert async await break case class continue def del elif else except finally for from global if import in is lambda match None nonlocal not or pass raise return self True False try while with yield",
  ruby: "alias and begin break case class def defined do else elsif end ensure false for if in module next nil not or redo rescue retry return self super then true undef unless until when while yield require",
  shell: "if then else elif fi for while until do done case esac function in return exit export local readonly set unset source sudo echo cd trap shift",
  sql: "add all alter and any as asc avg begin between by case check column commit constraint count create cross database default delete desc distinct drop else end exists explain false foreign from full function grant group having if in index inner insert into is join key left like limit max min not null offset on or order outer over partition primary references returning right rollback select set sum table then true union unique update using values view when where with",
  data: "true false null yes no on off",
};
const ALIASES = { python: "py python3 gyp", ruby: "rb", shell: "sh bash zsh console shellsession fish ksh", sql: "postgresql mysql sqlite plsql", data: "json jsonc json5 yaml yml toml ini", markup: "html xml svg vue xhtml", css: "scss less", diff: "patch", plain: "text txt plaintext none output log markdown md" };
const FAMILY = Object.fromEntries(Object.entries(ALIASES).flatMap(([family, names]) => [family, ...names.split(" ")].map((name) => [name, family])));

const STRING = String.raw`"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?`;
const NUMBER = String.raw`\b0[xXbBoO][\da-fA-F_]+\b|\b\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?\w*`;
const WORD = String.raw`[A-Za-z_$][\w$]*`;
const HASH = String.raw`(?<=^|\s)#.*`;
const rules = (...parts) => new RegExp(parts.map(([kind, source]) => `(?<${kind}>${source})`).join("|"), "gm");
const coded = (comment, string) => rules(["comment", comment], ["string", string], ["number", NUMBER], ["word", WORD]);
const RULES = {
  c: coded(String.raw`\/\/.*|\/\*[^]*?(?:\*\/|$(?![^]))`, `${STRING}|\`(?:\\\\.|[^\`\\\\])*\`?`),
  python: coded(String.raw`#.*`, String.raw`[rbfuRBFU]{0,2}(?:"""[^]*?(?:"""|$(?![^]))|'''[^]*?(?:'''|$(?![^])))|[rbfuRBFU]{0,2}(?:${STRING})`),
  ruby: coded(String.raw`#.*`, STRING),
  shell: coded(HASH, STRING),
  sql: coded(String.raw`--.*|\/\*[^]*?(?:\*\/|$(?![^]))`, `${STRING}|\`[^\`\n]*\`?`),
  data: rules(["comment", String.raw`(?<=^|\s)(?:#|\/\/).*`], ["name", String.raw`"(?:\\.|[^"\\\n])*"(?=\s*:)|^[ \t-]*[\w.-]+(?=\s*[:=](?:\s|$))`], ["string", STRING], ["number", NUMBER], ["word", WORD]),
  markup: rules(["comment", String.raw`<!--[^]*?(?:-->|$(?![^]))`], ["name", String.raw`<\/?[\w:-]+|\/?>|[\w:@.-]+(?==)`], ["string", String.raw`(?<==)${STRING}|(?<==)(?:${STRING})`]),
  css: rules(["comment", String.raw`\/\*[^]*?(?:\*\/|$(?![^]))`], ["string", STRING], ["name", String.raw`[-\w]+(?=\s*:\s)|@[\w-]+`], ["number", String.raw`#[\da-fA-F]{3,8}\b|-?\b\d[\d.]*(?:%|[a-z]+)?`]),
  diff: rules(["comment", "^(?:@@|diff|index|---|\\+\\+\\+).*"], ["add", "^\\+.*"], ["del", "^-.*"]),
};
const SETS = Object.fromEntries(Object.entries(WORDS).map(([family, words]) => [family, new Set(words.split(" "))]));
const MAX_CHARS = 60_000; // beyond, code stays plain

export const familyOf = (language) => FAMILY[language.toLowerCase()] ?? (language ? "c" : "plain");

export function highlighted(code, language = "") {
  const family = familyOf(language);
  const rule = RULES[family];
  if (!rule || code.length > MAX_CHARS) return [["", code]];
  const words = SETS[family];
  const runs = [];
  let at = 0;
  const put = (kind, text) => {
    if (!text) return;
    if (runs.length && runs.at(-1)[0] === kind) runs.at(-1)[1] += text;
    else runs.push([kind, text]);
  };
  for (const found of code.matchAll(rule)) {
    put("", code.slice(at, found.index));
    const kind = Object.keys(found.groups).find((name) => found.groups[name] !== undefined);
    const text = found[0];
    at = found.index + text.length;
    if (kind !== "word") put(kind, text);
    else if (words.has(family === "sql" ? text.toLowerCase() : text)) put("word", text);
    else put(code[at] === "(" && family !== "data" ? "call" : "", text);
  }
  put("", code.slice(at));
  return runs;
}
