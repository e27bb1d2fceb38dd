package oncegate.peers;

import com.sun.management.OperatingSystemMXBean;
import java.lang.management.ManagementFactory;
import java.util.Locale;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.atomic.AtomicLong;

/**
 * Measures the time and this process's processor time from the last effect of the warm-up to the
 * last effect.
 */
final class Meter {
    private final OperatingSystemMXBean process =
            (OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean();
    private final AtomicLong effects = new AtomicLong();
    private final CountDownLatch over = new CountDownLatch(1);
    private final long warmUp;
    private final long last;
    private volatile long startedNanos;
    private volatile long cpuNanos;
    private volatile String figures;

    /** @param warmUp how many effects are not measured: the JVM compiles its code during them */
    Meter(long warmUp, long count) {
        this.warmUp = warmUp;
        this.last = warmUp + count;
    }

    /** The effect of a message. */
    void effect() {
        long effect = effects.incrementAndGet();
        if (effect == warmUp) {
            startedNanos = System.nanoTime();
            cpuNanos = process.getProcessCpuTime();
        } else if (effect == last) {
            double seconds = (System.nanoTime() - startedNanos) / 1e9;
            double cpuMicros = (process.getProcessCpuTime() - cpuNanos) / 1e3;
            figures = String.format(
                    Locale.ROOT, "{\"seconds\":%.6f,\"cpu_micros\":%.0f}", seconds, cpuMicros);
            over.countDown();
        }
    }

    /** Waits for the last effect. Returns the figures as a line of JSON. */
    String figures() throws InterruptedException {
        over.await();
        return figures;
    }
}
