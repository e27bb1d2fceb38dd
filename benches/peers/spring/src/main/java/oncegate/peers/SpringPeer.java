package oncegate.peers;

import java.util.Map;
import org.apache.kafka.clients.consumer.ConsumerConfig;
import org.apache.kafka.common.serialization.StringDeserializer;
import org.springframework.context.annotation.AnnotationConfigApplicationContext;
import org.springframework.context.annotation.Bean;
import org.springframework.context.annotation.Configuration;
import org.springframework.data.redis.connection.lettuce.LettuceConnectionFactory;
import org.springframework.data.redis.core.StringRedisTemplate;
import org.springframework.integration.config.EnableIntegration;
import org.springframework.integration.dsl.IntegrationFlow;
import org.springframework.integration.handler.advice.IdempotentReceiverInterceptor;
import org.springframework.integration.kafka.dsl.Kafka;
import org.springframework.integration.kafka.inbound.KafkaMessageDrivenChannelAdapter.ListenerMode;
import org.springframework.integration.redis.metadata.RedisMetadataStore;
import org.springframework.integration.selector.MetadataStoreSelector;
import org.springframework.kafka.core.DefaultKafkaConsumerFactory;
import org.springframework.kafka.listener.ConcurrentMessageListenerContainer;
import org.springframework.kafka.listener.ContainerProperties;
import org.springframework.kafka.listener.MessageListener;

/**
 * Two idempotent receivers of Spring: {@code metadata-store} is the one of Spring Integration's
 * reference, and {@code set-nx} a listener that marks each key with one command.
 *
 * <p>Settings: a thread per partition, offsets committed once a poll (the default,
 * {@code AckMode.BATCH}), one Lettuce connection that all threads share (the default); the defaults
 * of the Kafka client and of the JVM.
 *
 * <p>Both mark the key before the handler runs, and neither removes the mark when the handler
 * fails.
 */
public final class SpringPeer {
    public static void main(String[] args) throws Exception {
        Work work = Work.of(args);
        Meter meter = new Meter(work.warmUp(), work.count());
        var redis = new LettuceConnectionFactory(work.redis().getHost(), work.redis().getPort());
        redis.afterPropertiesSet();
        redis.start();
        switch (work.receiver()) {
            case "metadata-store" -> metadataStore(work, meter, redis);
            case "set-nx" -> setNx(work, meter, redis);
            default -> throw new IllegalArgumentException("no receiver " + work.receiver());
        }
        redis.destroy();
    }

    private static void metadataStore(Work work, Meter meter, LettuceConnectionFactory redis)
            throws Exception {
        try (var context = new AnnotationConfigApplicationContext()) {
            context.register(Integration.class);
            context.registerBean(Work.class, () -> work);
            context.registerBean(Meter.class, () -> meter);
            context.registerBean(RedisMetadataStore.class, () -> new RedisMetadataStore(redis));
            context.refresh();
            System.out.println(meter.figures());
        }
    }

    private static void setNx(Work work, Meter meter, LettuceConnectionFactory factory)
            throws Exception {
        var redis = new StringRedisTemplate(factory);
        var container = container(work);
        MessageListener<String, String> listener = record -> {
            String key = Work.key(record.headers().lastHeader(Work.KEY_HEADER).value());
            if (Boolean.TRUE.equals(redis.opsForValue().setIfAbsent(key, "1", Work.RETENTION))) {
                meter.effect();
            }
        };
        container.getContainerProperties().setMessageListener(listener);
        container.start();
        System.out.println(meter.figures());
        container.stop();
    }

    private static ConcurrentMessageListenerContainer<String, String> container(Work work) {
        var consumers = new DefaultKafkaConsumerFactory<String, String>(Map.of(
                ConsumerConfig.BOOTSTRAP_SERVERS_CONFIG, work.brokers(),
                ConsumerConfig.GROUP_ID_CONFIG, work.group(),
                ConsumerConfig.AUTO_OFFSET_RESET_CONFIG, "earliest",
                ConsumerConfig.KEY_DESERIALIZER_CLASS_CONFIG, StringDeserializer.class,
                ConsumerConfig.VALUE_DESERIALIZER_CLASS_CONFIG, StringDeserializer.class));
        var properties = new ContainerProperties(work.topic());
        var container = new ConcurrentMessageListenerContainer<>(consumers, properties);
        container.setConcurrency(Work.PARTITIONS);
        return container;
    }

    /** A Kafka adapter, and a handler with the interceptor as its advice. */
    @Configuration
    @EnableIntegration
    static class Integration {
        @Bean
        IdempotentReceiverInterceptor interceptor(RedisMetadataStore store) {
            var interceptor = new IdempotentReceiverInterceptor(new MetadataStoreSelector(
                    message -> Work.key(message.getHeaders().get(Work.KEY_HEADER)), store));
            // A duplicate is dropped, and not handed on with a header.
            interceptor.setDiscardChannelName("nullChannel");
            return interceptor;
        }

        @Bean
        IntegrationFlow flow(Work work, Meter meter, IdempotentReceiverInterceptor interceptor) {
            var adapter = Kafka.messageDrivenChannelAdapter(container(work), ListenerMode.record);
            return IntegrationFlow.from(adapter)
                    .handle(message -> meter.effect(), endpoint -> endpoint.advice(interceptor))
                    .get();
        }
    }
}
