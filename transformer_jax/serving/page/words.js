// Words of a sentence and its translation, joined from tokens, with confidence and attention.

const UNSPACED = /[\p{sc=Han}\p{sc=Hira}\p{sc=Kana}\p{sc=Thai}\p{sc=Laoo}\p{sc=Khmr}\p{sc=Mymr}]/u;

const mean = (numbers) => numbers.reduce((sum, x) => sum + x, 0) / numbers.length;
const percent = (share) => `${Math.round(100 * share)}%`;
const utf8 = (text) => [...new TextEncoder().encode(text)];

/** The UTF-8 bytes of a token, without whitespace; none of the EOS token. */
function bytesOf(token, eos) {
  if (token === eos) return [];
  const byte = /^<0x([0-9A-F]{2})>$/.exec(token);
  return byte ? [parseInt(byte[1], 16)] : utf8(token === "<unk>" ? "⁇" : token.replace(/[▁\s]/g, ""));
}

/** Split a text into alternating words and whitespace. */
function partsOf(text) {
  if (!UNSPACED.test(text)) return text.split(/(\s+)/);
  const segments = new Intl.Segmenter(undefined, { granularity: "word" }).segment(text);
  return Array.from(segments, (each) => each.segment);
}

/** Words of a text as {before, text, tokens: indices}; null if the tokens do not spell the text. */
function wordsOf(tokens, text) {
  const eos = tokens.at(-1);
  const spelled = tokens.map((token) => bytesOf(token, eos));
  const owners = spelled.flatMap((bytes, i) => bytes.map(() => i)); // token of each byte
  const read = new TextDecoder().decode(Uint8Array.from(spelled.flat()));
  if (read !== text.replace(/\s/g, "")) return null;
  const words = [];
  let [before, byte, next] = ["", 0, 0];
  for (const part of partsOf(text)) {
    if (!part.trim()) {
      before += part;
      continue;
    }
    const first = Math.min(owners[byte], next); // a lone "▁" belongs to the next word
    byte += utf8(part).length;
    next = owners[byte - 1] + 1;
    const its = [...tokens.keys()].slice(first, next).filter((i) => tokens[i] !== eos);
    words.push({ before, text: part, tokens: its });
    before = "";
  }
  return words;
}

/** The whole text as one word, if tokens cannot be mapped to words. */
const whole = (tokens, text) => [{ before: "", text, tokens: [...(tokens ?? []).keys()], fact: "" }];

/** Words of a text that differs from its tokens by normalization or <unk>. */
function normalized(tokens, text) {
  const eos = tokens.at(-1);
  const spelled = tokens.filter((token) => token !== eos).map((token) => token.replace("<unk>", "⁇"));
  const words = wordsOf(tokens, spelled.join("").replaceAll("▁", " ")) ?? [];
  const shown = text.trim().split(/\s+/);
  if (words.length !== shown.length) return whole(tokens, text);
  return words.map((word, i) => ({ ...word, text: shown[i] }));
}

/** Isolate a word's text direction, for right-to-left scripts. */
export const isolated = (word) => `\u2068${word}\u2069`;

/** The words with the largest weights: "attends to Hund 62%, ein 20%". */
function mostOf(words, weights, verb) {
  const order = [...weights.keys()].sort((i, j) => weights[j] - weights[i]).slice(0, 3);
  const some = order.filter((i) => weights[i] >= 0.05);
  const said = some.map((i) => `${isolated(words[i].text)} ${percent(weights[i])}`).join(", ");
  return `${verb} ${said || "nothing in particular"}`;
}

/**
 * Source and target words of a sentence in a response.
 *
 * A word has `text`, `before` (whitespace), `fact` (a description) and, if available, `confidence`
 * and `weights`. The weights of a target word are its attention to each source word. The weights of
 * a source word are the attention of each target word to it.
 */
export function analyze({ source: line, source_tokens, translation, tokens, token_scores, alignment }) {
  const target = wordsOf(tokens ?? [], translation) ?? whole(tokens, translation);
  for (const word of target) {
    const scores = word.tokens.map((i) => token_scores?.[i]).filter(Number.isFinite);
    if (scores.length) word.confidence = Math.exp(mean(scores));
    word.fact = scores.length ? `${percent(word.confidence)} sure` : "";
  }
  if (!alignment) return { target, source: whole([], line) };
  const source = wordsOf(source_tokens, line) ?? normalized(source_tokens, line);
  for (const word of target) {
    const look = (other, i) => other.tokens.reduce((sum, j) => sum + alignment[i][j], 0);
    word.weights = source.map((other) => mean(word.tokens.map((i) => look(other, i))));
    word.fact += (word.fact && "; ") + mostOf(source, word.weights, "attends to");
  }
  for (const [j, word] of source.entries()) {
    word.weights = target.map((other) => other.weights[j]);
    word.fact = mostOf(target, word.weights, "attended to by");
  }
  return { target, source };
}
