// Watermill's Deduplicator over a topic, for the benchmark `peers`: with a repository over Redis,
// which a user writes because Watermill has none, and with its own one in memory.
//
// Settings: one consumer in the group, which handles the 12 partitions side by side and the
// messages of a partition one after the other; offsets are committed every second (the default); a
// Redis connection for each partition; no log lines.
//
// The Deduplicator marks the key before the handler runs, and does not remove the mark when the
// handler fails.
package main

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"time"

	"github.com/IBM/sarama"
	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-kafka/v3/pkg/kafka"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/redis/go-redis/v9"
)

const (
	partitions = 12
	// The header with the idempotency key.
	keyHeader = "order-id"
	// How long a key is kept: oncegate's default.
	retention = 7 * 24 * time.Hour
)

// redisRepository marks each key with one command.
type redisRepository struct {
	client *redis.Client
}

func (r redisRepository) IsDuplicate(ctx context.Context, key string) (bool, error) {
	fresh, err := r.client.SetNX(ctx, key, 1, retention).Result()
	return !fresh, err
}

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// run takes the arguments of the Java programs: receiver, brokers, topic, group, Redis, the number
// of messages of the warm-up, and of those that are measured.
func run(args []string) error {
	if len(args) != 7 {
		return fmt.Errorf("7 arguments are needed, not %d", len(args))
	}
	warmUp, err := strconv.ParseInt(args[5], 10, 64)
	if err != nil {
		return err
	}
	count, err := strconv.ParseInt(args[6], 10, 64)
	if err != nil {
		return err
	}
	keys, err := repository(args[0], args[4])
	if err != nil {
		return err
	}
	subscriber, err := subscriber(args[1], args[3])
	if err != nil {
		return err
	}
	router, err := message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
	if err != nil {
		return err
	}
	deduplicator := middleware.Deduplicator{
		KeyFactory: func(msg *message.Message) (string, error) {
			return msg.Metadata.Get(keyHeader), nil
		},
		Repository: keys,
		Timeout:    time.Minute,
	}
	router.AddMiddleware(deduplicator.Middleware)
	meter := newMeter(warmUp, count)
	router.AddConsumerHandler("effect", args[2], subscriber, func(*message.Message) error {
		meter.effect()
		return nil
	})
	ended := make(chan error, 1)
	go func() { ended <- router.Run(context.Background()) }()
	select {
	case err := <-ended:
		return fmt.Errorf("the router has ended before the last message: %w", err)
	case figures := <-meter.figures:
		fmt.Println(figures)
	}
	return router.Close()
}

func repository(receiver, url string) (middleware.ExpiringKeyRepository, error) {
	switch receiver {
	case "redis":
		options, err := redis.ParseURL(url)
		if err != nil {
			return nil, err
		}
		options.PoolSize = partitions
		return redisRepository{redis.NewClient(options)}, nil
	case "memory":
		return middleware.NewMapExpiringKeyRepository(retention)
	default:
		return nil, fmt.Errorf("no receiver %s", receiver)
	}
}

func subscriber(brokers, group string) (*kafka.Subscriber, error) {
	config := kafka.DefaultSaramaSubscriberConfig()
	// The default is older than what today's brokers understand.
	config.Version = sarama.V2_8_0_0
	config.Consumer.Offsets.Initial = sarama.OffsetOldest
	return kafka.NewSubscriber(kafka.SubscriberConfig{
		Brokers:               []string{brokers},
		Unmarshaler:           kafka.DefaultMarshaler{},
		OverwriteSaramaConfig: config,
		ConsumerGroup:         group,
	}, watermill.NopLogger{})
}
