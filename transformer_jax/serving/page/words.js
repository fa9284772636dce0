// Words of a sentence and of its translation, made of tokens: how sure, and what looked at what.

const UNSPACED = /[\p{sc=Han}\p{sc=Hira}\p{sc=Kana}\p{sc=Thai}\p{sc=Laoo}\p{sc=Khmr}\p{sc=Mymr}]/u;

const mean = (numbers) => numbers.reduce((sum, x) => sum + x, 0) / numbers.length;
const percent = (share) => `${Math.round(100 * share)}%`;
const utf8 = (text) => [...new TextEncoder().encode(text)];

/** What a token spells, without white space, in UTF-8. */
function bytesOf(token) {
  if (token === "</s>") return [];
  const byte = /^<0x([0-9A-F]{2})>$/.exec(token);
  return byte ? [parseInt(byte[1], 16)] : utf8(token === "<unk>" ? "⁇" : token.replace(/[▁\s]/g, ""));
}

/** The words of a text and the white space between them, in turn. */
function partsOf(text) {
  if (!UNSPACED.test(text)) return text.split(/(\s+)/);
  const segments = new Intl.Segmenter(undefined, { granularity: "word" }).segment(text);
  return Array.from(segments, (each) => each.segment);
}

/** The words of a text, {before, text, tokens: their places}; null if the tokens do not spell it. */
function wordsOf(tokens, text) {
  const spelled = tokens.map(bytesOf);
  const owners = spelled.flatMap((bytes, i) => bytes.map(() => i)); // of each byte its token
  const read = new TextDecoder().decode(Uint8Array.from(spelled.flat()));
  if (read !== text.replace(/\s/g, "")) return null;
  const words = [];
  let [before, byte, next] = ["", 0, 0];
  for (const part of partsOf(text)) {
    if (!part.trim()) {
      before += part;
      continue;
    }
    const first = Math.min(owners[byte], next); // a "▁" alone belongs to the word after it
    byte += utf8(part).length;
    next = owners[byte - 1] + 1;
    const its = [...tokens.keys()].slice(first, next).filter((i) => tokens[i] !== "</s>");
    words.push({ before, text: part, tokens: its });
    before = "";
  }
  return words;
}

/** A text of which it is not known what spells which word. */
const whole = (tokens, text) => [{ before: "", text, tokens: [...(tokens ?? []).keys()], fact: "" }];

/** The words of a text that its tokens spell in another way, or not at all (<unk>). */
function normalised(tokens, text) {
  const spelled = tokens.filter((token) => token !== "</s>").map((token) => token.replace("<unk>", "⁇"));
  const words = wordsOf(tokens, spelled.join("").replaceAll("▁", " ")) ?? [];
  const shown = text.trim().split(/\s+/);
  if (words.length !== shown.length) return whole(tokens, text);
  return words.map((word, i) => ({ ...word, text: shown[i] }));
}

/** A word that keeps its direction, right to left or not, among others. */
export const isolated = (word) => `\u2068${word}\u2069`;

/** "looked at Hund 62%, ein 20%": the words with most weight. */
function mostOf(words, weights, verb) {
  const order = [...weights.keys()].sort((i, j) => weights[j] - weights[i]).slice(0, 3);
  const some = order.filter((i) => weights[i] >= 0.05);
  const said = some.map((i) => `${isolated(words[i].text)} ${percent(weights[i])}`).join(", ");
  return `${verb} ${said || "nothing in particular"}`;
}

/**
 * The words of both sides of a sentence of the server's answer.
 *
 * A word has `text`, `before` (white space), `fact` (what is known of it, in words) and, where they
 * are known, `confidence` and `weights`: how much it looked at each word of the source; for those of
 * the source, how much each word of the translation looked at it.
 */
export function analyse({ source: line, source_tokens, translation, tokens, token_scores, alignment }) {
  const target = wordsOf(tokens ?? [], translation) ?? whole(tokens, translation);
  for (const word of target) {
    const scores = word.tokens.map((i) => token_scores?.[i]).filter(Number.isFinite);
    if (scores.length) word.confidence = Math.exp(mean(scores));
    word.fact = scores.length ? `${percent(word.confidence)} sure` : "";
  }
  if (!alignment) return { target, source: whole([], line) };
  const source = wordsOf(source_tokens, line) ?? normalised(source_tokens, line);
  for (const word of target) {
    const look = (other, i) => other.tokens.reduce((sum, j) => sum + alignment[i][j], 0);
    word.weights = source.map((other) => mean(word.tokens.map((i) => look(other, i))));
    word.fact += (word.fact && "; ") + mostOf(source, word.weights, "looked at");
  }
  for (const [j, word] of source.entries()) {
    word.weights = target.map((other) => other.weights[j]);
    word.fact = mostOf(target, word.weights, "looked at by");
  }
  return { target, source };
}
