package oncegate;

import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.math.BigDecimal;
import java.nio.ByteBuffer;
import java.nio.channels.FileChannel;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Base64;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/** Does what scripts/clients says, with the client of this package: commands and events are lines of JSON. */
final class Agent {
    private static FileChannel ledger;
    private static Once once;

    private static void say(Map<?, ?> command, Object... event) {
        Map<String, Object> line = new LinkedHashMap<>();
        line.put("id", command.get("id"));
        for (int at = 0; at < event.length; at += 2) line.put((String) event[at], event[at + 1]);
        synchronized (System.out) {
            System.out.println(Json.write(line));
            System.out.flush();
        }
    }

    private static long millis(Map<?, ?> command, String name) {
        return command.get(name) instanceof BigDecimal number ? number.longValueExact() : 0;
    }

    private static <T> T work(Map<?, ?> command, Once.Attempt attempt, T result) throws Exception {
        boolean isFenced = attempt.fencingToken() != null;
        say(command, "began", true, "attempt", attempt.number(), "recovered", attempt.recovered(), "fenced", isFenced);
        Thread.sleep(millis(command, "ms"));
        Map<String, Object> entry = new LinkedHashMap<>();
        entry.put("effect", command.get("id"));
        entry.put("pid", ProcessHandle.current().pid());
        entry.put("attempt", attempt.number());
        entry.put("key", command.get("key"));
        synchronized (ledger) {
            ledger.write(ByteBuffer.wrap(("\n" + Json.write(entry) + "\n").getBytes(StandardCharsets.UTF_8)));
            ledger.force(true);
        }
        while (command.get("until") instanceof String path && !Files.exists(Path.of(path))) {
            if (attempt.isCancelled() && !Boolean.TRUE.equals(command.get("ignores"))) {
                say(command, "cancelled", true);
                throw new IllegalStateException("cancelled");
            }
            if (!"compute".equals(command.get("work"))) pause(10);
        }
        pause(millis(command, "ms"));
        switch (String.valueOf(command.get("work"))) {
            case "raise" -> throw new IllegalStateException("the bank is closed");
            case "permanent" -> throw new Once.Permanent("no such user");
            case "later" -> throw Once.Retry.later("not yet", Duration.ZERO);
            default -> { }
        }
        return result;
    }

    /** A pause that a cancellation ends. */
    private static void pause(long millis) {
        try {
            Thread.sleep(millis);
        } catch (InterruptedException cancelled) {
            // The work asks whether it is cancelled.
        }
    }

    private static void call(Map<?, ?> command) {
        Once.Options options = Once.Options.DEFAULT.arguments(command.get("arguments"));
        if (command.get("function") instanceof String name) options = options.function(name);
        if (command.containsKey("wait_ms")) options = options.waiting(Duration.ofMillis(millis(command, "wait_ms")));
        if (command.containsKey("lease_ms")) options = options.lease(Duration.ofMillis(millis(command, "lease_ms")));
        Object key = command.get("key");
        try {
            if (command.get("bytes") instanceof String text) {
                byte[] raw = Base64.getDecoder().decode(text);
                byte[] result = once.run(key, byte[].class, attempt -> work(command, attempt, raw), options);
                say(command, "bytes", Base64.getEncoder().encodeToString(result));
            } else {
                Object result = command.get("result");
                say(command, "done", once.run(key, Object.class, attempt -> work(command, attempt, result), options));
            }
        } catch (Once.Failed error) {
            say(command, "error", error.getClass().getSimpleName(), "detail", error.getMessage());
        } catch (Exception error) {
            say(command, "error", "thrown", "detail", error.toString());
        }
    }

    public static void main(String[] arguments) throws Exception {
        ledger = FileChannel.open(Path.of(arguments[1]), StandardOpenOption.CREATE, StandardOpenOption.APPEND);
        String patience = System.getenv().getOrDefault("AGENT_PATIENCE", "10");
        once = new Once(System.getenv("ONCEGATE_URL"), () -> System.getenv("ONCEGATE_TOKEN"), arguments[0])
                .patience(Duration.ofMillis((long) (1000 * Double.parseDouble(patience))));
        List<Thread> threads = new ArrayList<>();
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line; (line = lines.readLine()) != null; ) {
            Map<?, ?> command = (Map<?, ?>) new Json(line).read();
            Thread thread = new Thread(() -> call(command));
            thread.start();
            threads.add(thread);
        }
        for (Thread thread : threads) thread.join();
        once.close();
    }
}
