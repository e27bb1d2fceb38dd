package oncegate.peers;

import java.net.URI;
import java.nio.charset.StandardCharsets;
import java.time.Duration;

/** The arguments of a program: which receiver it runs, and on what. */
record Work(
        String receiver,
        String brokers,
        String topic,
        String group,
        URI redis,
        long warmUp,
        long count) {
    /** The partitions of the topic, and so the threads that consume it. */
    static final int PARTITIONS = 12;
    /** The header with the idempotency key. */
    static final String KEY_HEADER = "order-id";
    /** How long a key is kept: oncegate's default. */
    static final Duration RETENTION = Duration.ofDays(7);

    static Work of(String[] args) {
        return new Work(
                args[0],
                args[1],
                args[2],
                args[3],
                URI.create(args[4]),
                Long.parseLong(args[5]),
                Long.parseLong(args[6]));
    }

    /** The idempotency key in the bytes of its header. */
    static String key(Object header) {
        return new String((byte[]) header, StandardCharsets.UTF_8);
    }
}
