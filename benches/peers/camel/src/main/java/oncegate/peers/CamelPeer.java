package oncegate.peers;

import java.net.URI;
import java.time.Duration;
import org.apache.camel.builder.RouteBuilder;
import org.apache.camel.component.redis.processor.idempotent.SpringRedisStringIdempotentRepository;
import org.apache.camel.impl.DefaultCamelContext;
import org.springframework.data.redis.connection.RedisStandaloneConfiguration;
import org.springframework.data.redis.connection.jedis.JedisClientConfiguration;
import org.springframework.data.redis.connection.jedis.JedisConnectionFactory;
import org.springframework.data.redis.core.StringRedisTemplate;
import redis.clients.jedis.JedisPoolConfig;

/**
 * Apache Camel's idempotent consumer: {@code eager} is the default, which marks a key before the
 * handler runs and removes the mark when the handler fails; {@code not-eager} looks first and marks
 * after the handler.
 *
 * <p>Settings: a consumer per partition, the offsets committed by the Kafka client (the default),
 * the repository of keys that expire, and a Jedis connection for each consumer; the defaults of the
 * Kafka client and of the JVM.
 */
public final class CamelPeer {
    public static void main(String[] args) throws Exception {
        Work work = Work.of(args);
        Meter meter = new Meter(work.warmUp(), work.count());
        boolean eager = switch (work.receiver()) {
            case "eager" -> true;
            case "not-eager" -> false;
            default -> throw new IllegalArgumentException("no receiver " + work.receiver());
        };
        JedisConnectionFactory redis = redis(work);
        var template = new StringRedisTemplate(redis);
        var repository = new SpringRedisStringIdempotentRepository(template, "orders");
        repository.setExpiry(Work.RETENTION.toSeconds());
        try (var camel = new DefaultCamelContext()) {
            camel.addRoutes(new RouteBuilder() {
                @Override
                public void configure() {
                    from(address(work))
                            .idempotentConsumer(header(Work.KEY_HEADER))
                            .idempotentRepository(repository)
                            .eager(eager)
                            .process(exchange -> meter.effect());
                }
            });
            camel.getShutdownStrategy().setTimeout(10);
            camel.start();
            System.out.println(meter.figures());
        }
        redis.destroy();
    }

    private static String address(Work work) {
        return "kafka:" + work.topic() + "?brokers=" + work.brokers() + "&groupId=" + work.group()
                + "&autoOffsetReset=earliest&consumersCount=" + Work.PARTITIONS;
    }

    private static JedisConnectionFactory redis(Work work) {
        var pool = new JedisPoolConfig();
        pool.setMaxTotal(Work.PARTITIONS);
        pool.setMaxIdle(Work.PARTITIONS);
        var client = JedisClientConfiguration.builder()
                .connectTimeout(Duration.ofSeconds(10))
                .usePooling()
                .poolConfig(pool)
                .build();
        URI url = work.redis();
        var server = new RedisStandaloneConfiguration(url.getHost(), url.getPort());
        var factory = new JedisConnectionFactory(server, client);
        factory.afterPropertiesSet();
        factory.start();
        return factory;
    }
}
