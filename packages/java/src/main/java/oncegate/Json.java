package oncegate;

import java.math.BigDecimal;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/** As much of JSON as claims need: the JDK has none. Numbers are read as {@link BigDecimal}. */
final class Json {
    private static final int MOST_NESTED = 100;
    private final String text;
    private int at, depth;

    Json(String text) {
        this.text = text;
    }

    static String write(Object value) {
        StringBuilder out = new StringBuilder();
        write(value, out, 0);
        return out.toString();
    }

    private static void write(Object value, StringBuilder out, int depth) {
        if (depth > MOST_NESTED) throw new IllegalArgumentException("a value is nested too deeply, or in itself");
        if (value instanceof Double number && !Double.isFinite(number) || value instanceof Float other && !Float.isFinite(other)) {
            throw new IllegalArgumentException(value + " is no number of JSON");
        }
        if (value == null || value instanceof Boolean || value instanceof Number) {
            out.append(value);
        } else if (value instanceof CharSequence words) {
            quote(words, out);
        } else if (value instanceof Map<?, ?> members) {
            String before = "{";
            for (Map.Entry<?, ?> member : members.entrySet()) {
                out.append(before);
                quote(String.valueOf(member.getKey()), out);
                out.append(':');
                write(member.getValue(), out, depth + 1);
                before = ",";
            }
            out.append(members.isEmpty() ? "{}" : "}");
        } else if (value instanceof Iterable<?> members) {
            String before = "[";
            for (Object member : members) {
                out.append(before);
                write(member, out, depth + 1);
                before = ",";
            }
            out.append(before.equals("[") ? "[]" : "]");
        } else {
            throw new IllegalArgumentException("a " + value.getClass().getName() + " is no JSON: make a map, a list, a string or a number of it");
        }
    }

    private static void quote(CharSequence words, StringBuilder out) {
        out.append('"');
        for (int at = 0; at < words.length(); at++) {
            char c = words.charAt(at);
            if (c == '"' || c == '\\') out.append('\\').append(c);
            else if (c < ' ' || Character.isSurrogate(c)) out.append(String.format("\\u%04x", (int) c));
            else out.append(c);
        }
        out.append('"');
    }

    /** Reads the whole text. */
    Object read() {
        Object value = value();
        if (peek() != 0) throw wrong();
        return value;
    }

    private Object value() {
        if (++depth > MOST_NESTED) throw wrong();
        Object value = switch (peek()) {
            case '{' -> members();
            case '[' -> elements();
            case '"' -> string();
            case 't' -> word("true", true);
            case 'f' -> word("false", false);
            case 'n' -> word("null", null);
            default -> number();
        };
        depth--;
        return value;
    }

    private Map<String, Object> members() {
        Map<String, Object> members = new LinkedHashMap<>();
        at++;
        if (peek() == '}') at++;
        else {
            do {
                if (peek() != '"') throw wrong();
                String name = string();
                if (peek() != ':') throw wrong();
                at++;
                members.put(name, value());
            } while (goesOn('}'));
        }
        return members;
    }

    private List<Object> elements() {
        List<Object> elements = new ArrayList<>();
        at++;
        if (peek() == ']') at++;
        else do elements.add(value()); while (goesOn(']'));
        return elements;
    }

    private boolean goesOn(char end) {
        char c = peek();
        at++;
        if (c != ',' && c != end) throw wrong();
        return c == ',';
    }

    private String string() {
        StringBuilder out = new StringBuilder();
        at++;
        for (char c; (c = next()) != '"'; ) {
            if (c != '\\') {
                out.append(c);
                continue;
            }
            switch (c = next()) {
                case 'n' -> out.append('\n');
                case 't' -> out.append('\t');
                case 'r' -> out.append('\r');
                case 'b' -> out.append('\b');
                case 'f' -> out.append('\f');
                case 'u' -> {
                    if (at + 4 > text.length()) throw wrong();
                    out.append((char) Integer.parseInt(text.substring(at, at + 4), 16));
                    at += 4;
                }
                default -> out.append(c);
            }
        }
        return out.toString();
    }

    private Object word(String word, Object value) {
        if (!text.startsWith(word, at)) throw wrong();
        at += word.length();
        return value;
    }

    private BigDecimal number() {
        int from = at;
        while (at < text.length() && "+-.eE0123456789".indexOf(text.charAt(at)) >= 0) at++;
        return new BigDecimal(text.substring(from, at));
    }

    /** The next character that is no space; 0 at the end. */
    private char peek() {
        while (at < text.length() && text.charAt(at) <= ' ') at++;
        return at < text.length() ? text.charAt(at) : 0;
    }

    private char next() {
        if (at >= text.length()) throw wrong();
        return text.charAt(at++);
    }

    private IllegalArgumentException wrong() {
        return new IllegalArgumentException("no JSON at character " + at);
    }
}
