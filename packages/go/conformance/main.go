// Command conformance does what scripts/clients says, with the client of this module: commands and events are lines of
// JSON.
package main

import (
	"bufio"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"oncegate/once"
)

type command struct {
	ID        string          `json:"id"`
	Key       any             `json:"key"`
	Work      string          `json:"work"`
	Result    json.RawMessage `json:"result"`
	Bytes     *string         `json:"bytes"`
	Arguments any             `json:"arguments"`
	Function  string          `json:"function"`
	WaitMs    *int64          `json:"wait_ms"`
	LeaseMs   int64           `json:"lease_ms"`
	Ms        int64           `json:"ms"`
	Until     string          `json:"until"`
	Ignores   bool            `json:"ignores"`
}

var (
	ledger   *os.File
	printing sync.Mutex
	classes  = map[string]error{
		"Unavailable": once.ErrUnavailable, "Refused": once.ErrRefused, "Busy": once.ErrBusy, "GivenUp": once.ErrGivenUp,
		"Mismatch": once.ErrMismatch, "LeaseLost": once.ErrLeaseLost, "OutcomeUnknown": once.ErrOutcomeUnknown,
		"ResultLost": once.ErrResultLost,
	}
)

func say(of *command, event map[string]any) {
	event["id"] = of.ID
	line, err := json.Marshal(event)
	if err != nil {
		panic(err)
	}
	printing.Lock()
	defer printing.Unlock()
	fmt.Println(string(line))
}

func work(ctx context.Context, of *command, attempt once.Attempt) error {
	say(of, map[string]any{
		"began": true, "attempt": attempt.Number, "recovered": attempt.Recovered, "fenced": attempt.FencingToken != 0,
	})
	time.Sleep(time.Duration(of.Ms) * time.Millisecond)
	entry, _ := json.Marshal(map[string]any{"effect": of.ID, "pid": os.Getpid(), "attempt": attempt.Number, "key": of.Key})
	if _, err := fmt.Fprintf(ledger, "\n%s\n", entry); err != nil {
		return err
	}
	if err := ledger.Sync(); err != nil {
		return err
	}
	for of.Until != "" {
		if _, err := os.Stat(of.Until); err == nil {
			break
		}
		if ctx.Err() != nil && !of.Ignores {
			say(of, map[string]any{"cancelled": true})
			return context.Cause(ctx)
		}
		if of.Work != "compute" {
			time.Sleep(10 * time.Millisecond)
		}
	}
	time.Sleep(time.Duration(of.Ms) * time.Millisecond)
	switch of.Work {
	case "raise":
		return errors.New("the bank is closed")
	case "permanent":
		return once.Permanent(errors.New("no such user"))
	case "later":
		return once.Later(0, errors.New("not yet"))
	}
	return nil
}

func call(client *once.Client, of *command) {
	options := []once.Option{}
	if of.Arguments != nil {
		options = append(options, once.Arguments(of.Arguments))
	}
	if of.Function != "" {
		options = append(options, once.Function(of.Function))
	}
	if of.WaitMs != nil {
		options = append(options, once.Wait(time.Duration(*of.WaitMs)*time.Millisecond))
	}
	if of.LeaseMs > 0 {
		options = append(options, once.Lease(time.Duration(of.LeaseMs)*time.Millisecond))
	}
	ctx := context.Background()
	var err error
	event := map[string]any{}
	if of.Bytes != nil {
		var result []byte
		result, err = once.Do(ctx, client, of.Key, func(ctx context.Context, attempt once.Attempt) ([]byte, error) {
			raw, bad := base64.StdEncoding.DecodeString(*of.Bytes)
			return raw, errors.Join(bad, work(ctx, of, attempt))
		}, options...)
		event["bytes"] = result
	} else {
		var result any
		result, err = once.Do(ctx, client, of.Key, func(ctx context.Context, attempt once.Attempt) (any, error) {
			return of.Result, work(ctx, of, attempt)
		}, options...)
		event["done"] = result
	}
	if err != nil {
		kind := "thrown"
		for name, class := range classes {
			if errors.Is(err, class) {
				kind = name
			}
		}
		event = map[string]any{"error": kind, "detail": err.Error()}
	}
	say(of, event)
}

func main() {
	var err error
	ledger, err = os.OpenFile(os.Args[2], os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		panic(err)
	}
	patience, err := time.ParseDuration(os.Getenv("AGENT_PATIENCE") + "s")
	if err != nil {
		patience = 10 * time.Second
	}
	client, err := once.NewClient(once.Config{Scope: os.Args[1], Patience: patience})
	if err != nil {
		panic(err)
	}
	running := sync.WaitGroup{}
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		of := &command{}
		if err := json.Unmarshal(lines.Bytes(), of); err != nil {
			panic(err)
		}
		running.Add(1)
		go func() {
			defer running.Done()
			call(client, of)
		}()
	}
	running.Wait()
	if err := client.Close(context.Background()); err != nil {
		panic(err)
	}
}
