package oncegate;

import java.io.IOException;
import java.math.BigDecimal;
import java.math.BigInteger;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Base64;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.UUID;
import java.util.function.Supplier;

/**
 * Runs functions once for a key, by claims of a server of oncegate.
 *
 * <pre>{@code
 * try (Once once = new Once("http://127.0.0.1:8081", () -> token, "nightly")) {
 *     long pages = once.run("2026-11-29", Long.class, attempt -> writePages());
 * }
 * }</pre>
 *
 * <p>A function that throws is released, and the next call tries again; {@link Permanent} gives up for good. Without the
 * server, nothing runs: the call throws {@link Unavailable}. It is safe to share among threads.
 */
@SuppressWarnings("serial") // its errors are not meant to be serialized
public final class Once implements AutoCloseable {
    private static final long FIRST_PAUSE_MS = 20, LONGEST_PAUSE_MS = 1000, LONGEST_WAIT_MS = 20_000, FOREVER = -1;
    private static final int EXTENDS = 3, MARGINS = 6, MOST_CLAIMS = 1000;
    private static final Set<Integer> AGAIN = Set.of(0, 408, 429, 502, 503, 504);
    /** The same for the end of a claim: the work has happened, and a rotated token or a moved server comes back. */
    private static final Set<Integer> AGAIN_AT_THE_END = Set.of(0, 401, 403, 404, 408, 429, 500, 502, 503, 504);
    private static final System.Logger LOG = System.getLogger("oncegate");

    private final HttpClient http = HttpClient.newBuilder().version(HttpClient.Version.HTTP_1_1).build();
    private final String url, scope;
    private final Supplier<String> token;
    private final Map<String, Attempt> held = new HashMap<>(); // guarded by itself
    private Duration patience = Duration.ofSeconds(10), settle = Duration.ofMinutes(5);
    private Thread heartbeats;
    private volatile boolean isClosed;
    private boolean isOver; // nothing is extended any more

    /**
     * A client of the server at {@code url}. {@code token} is asked for each request, so it may be rotated; see
     * {@link #tokenFile}.
     */
    public Once(String url, Supplier<String> token, String scope) {
        this.url = url.replaceAll("/+$", "");
        this.token = token;
        this.scope = scope;
    }

    /** The token in a file, which is read for each request. */
    public static Supplier<String> tokenFile(Path path) {
        return () -> {
            try {
                return Files.readString(path).strip().lines().findFirst().orElse("");
            } catch (IOException error) {
                throw new java.io.UncheckedIOException(error);
            }
        };
    }

    /** How long a claim that is not answered is repeated before {@link Unavailable}: 10 s by default. */
    public Once patience(Duration patience) {
        this.patience = patience;
        return this;
    }

    /** How long the outcome of a function is repeated before {@link OutcomeUnknown}: 5 minutes by default. */
    public Once settle(Duration settle) {
        this.settle = settle;
        return this;
    }

    /** The work of a key. */
    @FunctionalInterface
    public interface Work<T> {
        T call(Attempt attempt) throws Exception;
    }

    /** Settings of a call. Each method returns changed ones. */
    public record Options(String function, Object arguments, Duration waiting, Duration lease, Duration retention) {
        public static final Options DEFAULT = new Options(null, null, null, null, null);

        /** The name of the function, which is then a part of the key. */
        public Options function(String name) {
            return new Options(name, arguments, waiting, lease, retention);
        }

        /** The arguments of the work: the same key with other ones is a {@link Mismatch}. */
        public Options arguments(Object json) {
            return new Options(function, json, waiting, lease, retention);
        }

        /** How long to wait for a call that runs elsewhere: as long as it takes by default, zero for {@link Busy} at once. */
        public Options waiting(Duration limit) {
            return new Options(function, arguments, limit, lease, retention);
        }

        /** The lease, at most that of the scope, which is the default. */
        public Options lease(Duration period) {
            return new Options(function, arguments, waiting, period, retention);
        }

        /** How long the result is kept, at most as long as the scope keeps it, which is the default. */
        public Options retention(Duration period) {
            return new Options(function, arguments, waiting, lease, period);
        }
    }

    /** A run of a function under its claim. */
    public final class Attempt {
        private final String claim;
        private final long leaseNs;
        private final int number;
        private final boolean recovered;
        private final Long fencingToken;
        private long validUntil, extendAt; // guarded by `held`
        private boolean isOver;
        private Thread worker;
        private volatile boolean isCancelled;

        private Attempt(Map<?, ?> answer, long sentAt) {
            claim = (String) answer.get("claim");
            leaseNs = ((Number) answer.get("lease_ms")).longValue() * 1_000_000;
            number = ((Number) answer.get("attempt")).intValue();
            recovered = (Boolean) answer.get("recovered");
            fencingToken = answer.get("fencing_token") instanceof Number token ? token.longValue() : null;
            worker = Thread.currentThread();
            extended(sentAt);
        }

        /** 1, 2, 3 … */
        public int number() {
            return number;
        }

        /** Whether an earlier attempt ended without an outcome: ask downstream whether its effect has happened. */
        public boolean recovered() {
            return recovered;
        }

        /** A number that only grows for the key, in a scope with {@code fenced = true}; otherwise null. */
        public Long fencingToken() {
            return fencingToken;
        }

        /** Whether the claim is lost, because another process may have taken over. The thread is interrupted then, too. */
        public boolean isCancelled() {
            return isCancelled;
        }

        private void extended(long sentAt) {
            validUntil = sentAt + leaseNs;
            extendAt = sentAt + leaseNs / EXTENDS;
        }

        private boolean isFresh() {
            return extendAt - System.nanoTime() > 0;
        }

        private void lose() {
            if (!isCancelled) {
                isCancelled = true;
                if (worker != null) worker.interrupt();
            }
        }

        /** From here on, its thread does something else. */
        private void returned() {
            synchronized (held) {
                worker = null;
                if (isCancelled) Thread.interrupted();
            }
        }
    }

    /** Calls {@code work} once for the key; see {@link #run(Object, Class, Work, Options)}. */
    public <T> T run(Object key, Class<T> type, Work<T> work) throws Exception {
        return run(key, type, work, Options.DEFAULT);
    }

    /**
     * Calls {@code work} once for the key, and returns its result; a later call, in whatever process, gets the first
     * result. Key, arguments and result are JSON: strings, numbers, booleans, null, lists and maps; a result may also be
     * {@code byte[]}. What {@code work} throws is passed on, and the next call tries again.
     *
     * @throws Failed one of its classes, when there is no result
     */
    public <T> T run(Object key, Class<T> type, Work<T> work, Options options) throws Exception {
        Object claimed = claim(key, options);
        if (!(claimed instanceof Attempt attempt)) return resultOf((Map<?, ?>) claimed, type);
        if (!hold(attempt)) {
            end("/v1/claims/release", Map.of("claim", attempt.claim, "counted", false, "reason", "the client is closed"), patience);
            throw new Unavailable("the client is closed: nothing was run");
        }
        try {
            T result;
            try {
                result = work.call(attempt);
            } catch (Throwable error) {
                attempt.returned();
                if (attempt.isCancelled) throw new LeaseLost("the claim was lost: another process may have taken over", error);
                fail(attempt, error);
                throw error;
            }
            attempt.returned();
            complete(attempt, result);
            return result;
        } finally {
            synchronized (held) {
                held.remove(attempt.claim);
                held.notifyAll();
            }
        }
    }

    /** Waits for what runs, up to 30 s, and ends the heartbeats. */
    @Override
    public void close() {
        long until = System.nanoTime() + Duration.ofSeconds(30).toNanos();
        synchronized (held) {
            isClosed = true;
            held.notifyAll();
            for (long left; !held.isEmpty() && (left = (until - System.nanoTime()) / 1_000_000) > 0; ) {
                try {
                    held.wait(left);
                } catch (InterruptedException interrupted) {
                    Thread.currentThread().interrupt();
                    break;
                }
            }
            isOver = true;
            for (Attempt attempt : held.values()) attempt.lose(); // nothing extends them any more
            held.clear();
            held.notifyAll();
        }
    }

    private Object claim(Object key, Options options) throws InterruptedException {
        if (isClosed) throw new Unavailable("the client is closed: nothing was run");
        Map<String, Object> request = new LinkedHashMap<>();
        request.put("scope", scope);
        request.put("key", key);
        if (options.function != null) request.put("function", options.function);
        if (options.arguments != null) request.put("arguments", options.arguments);
        if (options.lease != null) request.put("lease_ms", options.lease.toMillis());
        if (options.retention != null) request.put("retention_ms", options.retention.toMillis());
        long waitMs = options.waiting == null ? FOREVER : options.waiting.toMillis();
        long began = System.nanoTime(), answeredAt = began, pause = FIRST_PAUSE_MS;
        // Before any request with this nonce that may have been granted: a repeat gets the same grant, and not a new lease.
        long since = 0;
        boolean isNew = true;
        while (true) {
            long left = waitMs == FOREVER ? LONGEST_WAIT_MS : Math.max(0, Math.min(LONGEST_WAIT_MS, waitMs - since(began)));
            request.put("wait_ms", left);
            long sentAt = System.nanoTime();
            if (isNew) {
                request.put("nonce", UUID.randomUUID().toString());
                since = sentAt;
                isNew = false;
            }
            Answer answer = post("/v1/claims", request, left + patience.toMillis());
            if (answer.status == 200 && answer.state().equals("completed")) return answer.body;
            if (answer.status == 201 && answer.state().equals("granted")) {
                Attempt attempt = new Attempt(answer.body, since);
                if (attempt.isFresh()) return attempt;
                // Much of its lease is over, by a wait or a lost answer: it begins under a fresh one.
                long extendedAt = System.nanoTime();
                Answer extended = post("/v1/claims/extend", Map.of("claims", List.of(attempt.claim)), patience.toMillis());
                Object state = stateOf(extended, 0);
                if (state.equals("extended")) {
                    attempt.extended(extendedAt);
                    if (attempt.isFresh()) return attempt;
                }
                if (!state.equals("unknown")) answeredAt = System.nanoTime();
                // Another one has taken over, and nothing was run.
                isNew = !state.equals("unknown") && !state.equals("extended");
                answer = new Answer(0, Map.of("detail", "the claim was not confirmed in time"));
            }
            switch (answer.state()) {
                case "given-up" -> throw new GivenUp(answer.text("reason"));
                case "mismatch" -> throw new Mismatch(answer.text("detail"));
                case "busy" -> {
                    long retryInMs = ((Number) answer.body.get("retry_in_ms")).longValue();
                    answeredAt = System.nanoTime();
                    since = sentAt;
                    if (waitMs != FOREVER && since(began) + Math.min(retryInMs, FIRST_PAUSE_MS) >= waitMs) throw new Busy(retryInMs);
                    Thread.sleep(Math.min(retryInMs, pause));
                }
                default -> {
                    if (!AGAIN.contains(answer.status)) throw new Refused(answer.state() + ": " + answer.text("detail"));
                    if (since(answeredAt) >= patience.toMillis()) {
                        throw new Unavailable("nothing was run, because the claim was not answered: " + answer.text("detail"));
                    }
                    // It may have been granted: the same nonce gets the same grant.
                    Thread.sleep(pause);
                }
            }
            pause = Math.min(pause * 2, LONGEST_PAUSE_MS);
        }
    }

    private void complete(Attempt attempt, Object result) {
        Map<String, Object> form = new HashMap<>(Map.of("claim", attempt.claim));
        Map<String, Object> without = Map.of("claim", attempt.claim, "without_result", true);
        if (result instanceof byte[] bytes) form.put("result_base64", Base64.getEncoder().encodeToString(bytes));
        else form.put("result", result);
        try {
            Json.write(form);
        } catch (IllegalArgumentException error) {
            LOG.log(System.Logger.Level.WARNING, "the work is recorded without its result: " + error.getMessage());
            form = without;
        }
        Answer answer = end("/v1/claims/complete", form, settle);
        if (answer.status == 400 || answer.status == 413) {
            LOG.log(System.Logger.Level.WARNING, "the work is recorded without its result, which is too large or no JSON");
            answer = end("/v1/claims/complete", without, settle);
        }
        if (answer.status == 200) return;
        if (answer.state().equals("lease-lost")) {
            throw new LeaseLost("the function has run, and another process has taken over: its result counts", null);
        }
        throw new OutcomeUnknown("the function has run, and that is not recorded: " + answer.text("detail"));
    }

    private void fail(Attempt attempt, Throwable error) {
        Map<String, Object> body = new HashMap<>(Map.of("claim", attempt.claim));
        String reason = error.toString();
        reason = reason.substring(0, Math.min(reason.length(), 1000));
        // Halves of surrogate pairs are no text for the server.
        body.put("reason", new String(reason.getBytes(StandardCharsets.UTF_8), StandardCharsets.UTF_8));
        String path = error instanceof Permanent ? "/v1/claims/fail" : "/v1/claims/release";
        if (error instanceof Retry retry) {
            body.put("counted", retry.isCounted);
            body.put("retry_in_ms", retry.delay.toMillis());
        }
        Answer answer = end(path, body, patience);
        if (answer.status != 200) {
            LOG.log(System.Logger.Level.WARNING, "the failed attempt was not released, so its lease lapses: " + answer.text("detail"));
        }
    }

    /** Repeats the end of a claim until its outcome is known. The status is 0 if it stays unknown. */
    private Answer end(String path, Map<String, Object> body, Duration patience) {
        long began = System.nanoTime();
        boolean isInterrupted = false;
        try {
            for (long pause = FIRST_PAUSE_MS; ; pause = Math.min(pause * 2, LONGEST_PAUSE_MS)) {
                try {
                    Answer answer = post(path, body, 10_000);
                    boolean isAnswer = answer.status != 200 || answer.body.containsKey("state");
                    if (isAnswer && !AGAIN_AT_THE_END.contains(answer.status)) return answer;
                    if (since(began) >= patience.toMillis()) return new Answer(0, answer.body);
                    Thread.sleep(pause);
                } catch (InterruptedException interrupted) {
                    isInterrupted = true; // what has happened is recorded all the same
                }
            }
        } finally {
            if (isInterrupted) Thread.currentThread().interrupt();
        }
    }

    private record Answer(int status, Map<?, ?> body) {
        String text(String name) {
            return String.valueOf(body.get(name));
        }

        String state() {
            return text("state");
        }
    }

    /** Sends a request. The status is 0 without an answer. */
    private Answer post(String path, Map<String, Object> body, long limitMs) throws InterruptedException {
        String text = Json.write(body);
        int status = 0;
        try {
            HttpRequest request = HttpRequest.newBuilder(URI.create(url + path))
                    .timeout(Duration.ofMillis(limitMs))
                    .header("content-type", "application/json")
                    .header("authorization", "Bearer " + token.get())
                    .POST(HttpRequest.BodyPublishers.ofString(text))
                    .build();
            HttpResponse<String> response = http.send(request, HttpResponse.BodyHandlers.ofString());
            status = response.statusCode();
            if (new Json(response.body()).read() instanceof Map<?, ?> answer) return new Answer(status, answer);
        } catch (IOException | RuntimeException error) { // of the token, too, which may be there again later
            if (status < 400) return new Answer(0, Map.of("detail", error.toString()));
        }
        // Of something in between: only its refusal counts.
        return new Answer(status >= 400 ? status : 0, Map.of("detail", "HTTP status " + status));
    }

    private static long since(long began) {
        return (System.nanoTime() - began) / 1_000_000;
    }

    /** False when the client is closed: nothing would extend it. */
    private boolean hold(Attempt attempt) {
        synchronized (held) {
            if (isOver) return false;
            held.put(attempt.claim, attempt);
            if (heartbeats == null) {
                heartbeats = new Thread(this::beat, "oncegate-heartbeats");
                heartbeats.setDaemon(true);
                heartbeats.start();
                Thread watch = new Thread(this::watch, "oncegate-leases");
                watch.setDaemon(true);
                watch.start();
            }
            held.notifyAll();
            return true;
        }
    }

    /** Tells of a lease that is nearly over, also while a heartbeat has no answer. */
    private void watch() {
        try {
            synchronized (held) {
                while (!isOver) {
                    long now = System.nanoTime(), next = Duration.ofHours(1).toNanos();
                    for (Attempt attempt : held.values()) {
                        long left = attempt.validUntil - attempt.leaseNs / MARGINS - now;
                        if (left <= 0) attempt.lose();
                        else next = Math.min(next, left);
                    }
                    held.wait(next / 1_000_000 + 1);
                }
            }
        } catch (InterruptedException never) {
            Thread.currentThread().interrupt();
        }
    }

    /** The state of a claim in the answer to a heartbeat. */
    private static Object stateOf(Answer answer, int at) {
        boolean isThere = answer.status == 200 && answer.body.get("claims") instanceof List<?> claims && at < claims.size();
        if (isThere && ((List<?>) answer.body.get("claims")).get(at) instanceof Map<?, ?> claim && claim.get("state") instanceof String state) {
            return state;
        }
        return "unknown";
    }

    /** Extends all claims, from a thread of its own, until the client is closed and nothing runs. */
    private void beat() {
        try {
            while (true) {
                List<Attempt> due = new ArrayList<>();
                long sentAt, shortest = Long.MAX_VALUE;
                synchronized (held) {
                    sentAt = System.nanoTime();
                    if (isOver) return;
                    long next = Duration.ofHours(1).toNanos();
                    for (Attempt attempt : held.values()) {
                        if (attempt.isOver) continue;
                        if (attempt.extendAt - sentAt > 0) next = Math.min(next, attempt.extendAt - sentAt);
                        else if (due.size() < MOST_CLAIMS) due.add(attempt);
                    }
                    if (due.isEmpty()) {
                        held.wait(next / 1_000_000 + 1);
                        continue;
                    }
                }
                for (Attempt attempt : due) shortest = Math.min(shortest, attempt.leaseNs);
                List<String> claims = due.stream().map(attempt -> attempt.claim).toList();
                Answer answer = postQuietly(Map.of("claims", claims), Math.max(50, shortest / EXTENDS / 1_000_000));
                synchronized (held) {
                    for (int at = 0; at < due.size(); at++) {
                        Attempt attempt = due.get(at);
                        Object state = stateOf(answer, at);
                        if ("extended".equals(state)) attempt.extended(sentAt);
                        else if ("unknown".equals(state)) attempt.extendAt = System.nanoTime() + attempt.leaseNs / 20;
                        else {
                            attempt.isOver = true;
                            attempt.lose();
                        }
                    }
                }
            }
        } catch (InterruptedException never) {
            Thread.currentThread().interrupt();
        }
    }

    /** A heartbeat that cannot be sent, whatever the reason, is one without an answer. */
    private Answer postQuietly(Map<String, Object> body, long limitMs) throws InterruptedException {
        try {
            return post("/v1/claims/extend", body, limitMs);
        } catch (RuntimeException error) {
            LOG.log(System.Logger.Level.WARNING, "a heartbeat was not sent", error);
            return new Answer(0, Map.of());
        }
    }

    private static <T> T resultOf(Map<?, ?> answer, Class<T> type) {
        if (answer.containsKey("result_lost")) throw new ResultLost("the work is done, and its result is lost: " + answer.get("result_lost"));
        Object found = answer.get("result");
        if (answer.get("result_base64") instanceof String text) found = Base64.getDecoder().decode(text);
        if (found instanceof BigDecimal number) {
            if (type == Integer.class) found = number.intValueExact();
            else if (type == Long.class) found = number.longValueExact();
            else if (type == Double.class) found = number.doubleValue();
            else if (type == BigInteger.class) found = number.toBigIntegerExact();
        }
        if (found != null && !type.isInstance(found)) throw new ResultLost("the result is no " + type.getSimpleName());
        return type.cast(found);
    }

    /** The error of a function that no other attempt would change: the key is given up. */
    public static class Permanent extends RuntimeException {
        public Permanent(String reason) {
            super(reason);
        }
    }

    /** The error of a function after which the next attempt is due when the delay has passed. */
    public static class Retry extends RuntimeException {
        private final Duration delay;
        private final boolean isCounted;

        /** It counts as an attempt. */
        public Retry(String reason, Duration delay) {
            this(reason, delay, true);
        }

        private Retry(String reason, Duration delay, boolean isCounted) {
            super(reason);
            this.delay = delay;
            this.isCounted = isCounted;
        }

        /** Work that cannot be done yet: it has not failed, and counts as no attempt. */
        public static Retry later(String reason, Duration delay) {
            return new Retry(reason, delay, false);
        }
    }

    /** The reason for which a call has no result. */
    public abstract static class Failed extends RuntimeException {
        private Failed(String what, Throwable cause) {
            super(what, cause);
        }
    }

    /** The server or its store did not answer the claim in time: nothing was run. */
    public static final class Unavailable extends Failed {
        private Unavailable(String what) {
            super(what, null);
        }
    }

    /** The server refuses the request until the token, the scope, the key or a setting is another one. */
    public static final class Refused extends Failed {
        private Refused(String what) {
            super(what, null);
        }
    }

    /** Another call has the key, or its next attempt is not due: nothing was run. */
    public static final class Busy extends Failed {
        /** When it is worth calling again. */
        public final Duration retryIn;

        private Busy(long retryInMs) {
            super("another call has the key, or its next attempt is not due: call again in " + retryInMs + " ms", null);
            retryIn = Duration.ofMillis(retryInMs);
        }
    }

    /** No attempt follows: one has failed for good, or all are used up. */
    public static final class GivenUp extends Failed {
        private GivenUp(String what) {
            super(what, null);
        }
    }

    /** The key is known with other arguments. */
    public static final class Mismatch extends Failed {
        private Mismatch(String what) {
            super(what, null);
        }
    }

    /** The claim was lost while the function ran: another process may have taken over. */
    public static final class LeaseLost extends Failed {
        private LeaseLost(String what, Throwable cause) {
            super(what, cause);
        }
    }

    /** The function has run, and the server did not confirm it in time: call again to learn what is recorded. */
    public static final class OutcomeUnknown extends Failed {
        private OutcomeUnknown(String what) {
            super(what, null);
        }
    }

    /** The work is done, and its result was not kept, or is of another type. */
    public static final class ResultLost extends Failed {
        private ResultLost(String what) {
            super(what, null);
        }
    }
}
