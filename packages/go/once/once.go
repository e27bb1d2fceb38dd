// Package once runs functions once for a key, by claims of a server of oncegate.
//
//	client, err := once.NewClient(once.Config{URL: "http://127.0.0.1:8081", Token: token, Scope: "nightly"})
//	pages, err := once.Do(ctx, client, "2026-11-29", func(ctx context.Context, attempt once.Attempt) (int, error) {
//		return writePages(ctx)
//	})
//
// A function that returns an error is released, and the next call tries again; [Permanent] gives up for good. Without the
// server, nothing runs: the error is [ErrUnavailable].
package once

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"
)

// The reasons for which a call has no result. Compare with [errors.Is].
var (
	// ErrUnavailable: the server or its store did not answer the claim in time. Nothing was run.
	ErrUnavailable = errors.New("nothing was run, because the claim was not answered")
	// ErrRefused: the server refuses the request until the token, the scope, the key or a setting is another one.
	ErrRefused = errors.New("the server refuses")
	// ErrBusy: another call has the key, or its next attempt is not due. Nothing was run. It is a [*BusyError].
	ErrBusy = errors.New("another call has the key, or its next attempt is not due")
	// ErrGivenUp: no attempt follows. One has failed for good, or all are used up.
	ErrGivenUp = errors.New("the work was given up")
	// ErrMismatch: the key is known with other arguments.
	ErrMismatch = errors.New("the key is known with other arguments")
	// ErrLeaseLost: the claim was lost while the function ran. It is also the cause of its cancelled context.
	ErrLeaseLost = errors.New("the claim was lost: another process may have taken over")
	// ErrOutcomeUnknown: the function has run, and the server did not confirm it in time. Call again.
	ErrOutcomeUnknown = errors.New("the function has run, and that is not confirmed")
	// ErrResultLost: the work is done, and its result was not kept, or is of another type.
	ErrResultLost = errors.New("the work is done, and its result is lost")
)

// BusyError says when it is worth calling again.
type BusyError struct{ RetryIn time.Duration }

func (e *BusyError) Error() string        { return fmt.Sprintf("%v: call again in %v", ErrBusy, e.RetryIn) }
func (e *BusyError) Is(target error) bool { return target == ErrBusy }

type failure struct {
	error
	path    string
	counted bool
	retryIn *time.Duration
}

func (f *failure) Unwrap() error { return f.error }

// Permanent marks an error that no other attempt would change: the key is given up.
func Permanent(err error) error { return &failure{error: err, path: "/v1/claims/fail"} }

// RetryAfter marks an error after which the next attempt is due when the delay has passed.
func RetryAfter(delay time.Duration, err error) error {
	return &failure{error: err, path: "/v1/claims/release", counted: true, retryIn: &delay}
}

// Later marks work that cannot be done yet: it has not failed, and counts as no attempt.
func Later(delay time.Duration, reason error) error {
	return &failure{error: reason, path: "/v1/claims/release", retryIn: &delay}
}

// Attempt is a run of a function under its claim.
type Attempt struct {
	// Number counts from 1.
	Number int
	// Recovered: an earlier attempt ended without an outcome. Ask downstream whether its effect has happened.
	Recovered bool
	// FencingToken only grows for the key, in a scope with `fenced = true`; otherwise it is 0.
	FencingToken uint64
}

// Config says how a server is reached.
type Config struct {
	// URL is ONCEGATE_URL by default.
	URL string
	// Token is ONCEGATE_TOKEN by default.
	Token string
	// TokenFile has the token, and is read for each request, so it may be rotated.
	TokenFile string
	// Scope is the namespace of the keys: one of those that the server gives the token.
	Scope string
	// Patience is how long a claim that is not answered is repeated before [ErrUnavailable]: 10 s by default.
	Patience time.Duration
	// Settle is how long the outcome of a function is repeated before [ErrOutcomeUnknown]: 5 min by default.
	Settle time.Duration
	// HTTP sends the requests; [http.DefaultClient] by default.
	HTTP *http.Client
}

// Client is a client of a server of oncegate. It is safe for concurrent use.
type Client struct {
	config  Config
	changed chan struct{} // for the heartbeats
	watched chan struct{} // for what watches the leases
	mutex   sync.Mutex
	held    map[string]*held
	running sync.WaitGroup
	ending  sync.Once
	closed  chan struct{}
	// Nothing begins any more; nothing is extended any more.
	isClosed, isOver bool
}

// NewClient checks the configuration. It sends nothing.
func NewClient(config Config) (*Client, error) {
	if config.URL == "" {
		config.URL = os.Getenv("ONCEGATE_URL")
	}
	if config.Token == "" {
		config.Token = os.Getenv("ONCEGATE_TOKEN")
	}
	if config.URL == "" || config.Scope == "" || (config.Token == "" && config.TokenFile == "") {
		return nil, errors.New("the client needs the URL of the server, a token and a scope: set ONCEGATE_URL and ONCEGATE_TOKEN")
	}
	if config.Patience == 0 {
		config.Patience = 10 * time.Second
	}
	if config.Settle == 0 {
		config.Settle = 5 * time.Minute
	}
	if config.HTTP == nil {
		config.HTTP = http.DefaultClient
	}
	config.URL = strings.TrimRight(config.URL, "/")
	client := &Client{config: config, held: map[string]*held{}, closed: make(chan struct{})}
	client.changed, client.watched = make(chan struct{}, 1), make(chan struct{}, 1)
	go client.heartbeats()
	go client.watch()
	return client, nil
}

// Close waits for what runs, until the context is done, and ends the heartbeats.
func (c *Client) Close(ctx context.Context) error {
	c.mutex.Lock()
	c.isClosed = true
	c.mutex.Unlock()
	ended := make(chan struct{})
	go func() { c.running.Wait(); close(ended) }()
	defer c.ending.Do(c.stop)
	select {
	case <-ended:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Option is a setting of one call.
type Option func(*call)

type call struct {
	request map[string]any
	wait    time.Duration
}

// Function names the function, which is then a part of the key.
func Function(name string) Option { return func(c *call) { c.request["function"] = name } }

// Arguments are those of the work, as JSON: the same key with other ones is [ErrMismatch].
func Arguments(arguments any) Option { return func(c *call) { c.request["arguments"] = arguments } }

// Wait limits how long the call waits for one that runs elsewhere: 0 is [ErrBusy] at once. Without it, the context alone
// does.
func Wait(limit time.Duration) Option { return func(c *call) { c.wait = limit } }

// Lease is at most that of the scope, which is the default.
func Lease(lease time.Duration) Option {
	return func(c *call) { c.request["lease_ms"] = lease.Milliseconds() }
}

// Retention is how long the result is kept, at most as long as the scope keeps it, which is the default.
func Retention(retention time.Duration) Option {
	return func(c *call) { c.request["retention_ms"] = retention.Milliseconds() }
}

// Do calls work once for the key, which is anything that is JSON, and returns its result. A later call, in whatever
// process, gets the first result and runs nothing. The context of work is cancelled when the claim is lost, with the cause
// [ErrLeaseLost].
func Do[T any](ctx context.Context, c *Client, key any, work func(context.Context, Attempt) (T, error), options ...Option) (T, error) {
	var result T
	of := &call{request: map[string]any{"scope": c.config.Scope, "key": key}, wait: forever}
	for _, option := range options {
		option(of)
	}
	if !c.begin() {
		return result, fmt.Errorf("%w: the client is closed", ErrUnavailable)
	}
	defer c.running.Done()
	granted, sentAt, err := c.claim(ctx, of)
	if err != nil {
		return result, err
	}
	if granted.State == "completed" {
		return result, resultOf(granted, &result)
	}
	working, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	// What has begun is ended, whatever becomes of the caller's context.
	ending := context.WithoutCancel(ctx)
	claim, isExtended := c.hold(granted, sentAt, cancel)
	defer c.letGo(claim)
	if !isExtended || ctx.Err() != nil {
		c.fail(ending, claim, errors.New("nothing was run"), false)
		if ctx.Err() != nil {
			return result, ctx.Err()
		}
		return result, fmt.Errorf("%w: the client is closed", ErrUnavailable)
	}
	hasReturned := false
	defer func() {
		if !hasReturned { // it has panicked, and goes on to
			c.fail(ending, claim, errors.New("the function has panicked"), true)
		}
	}()
	result, err = work(working, Attempt{granted.Attempt, granted.Recovered, granted.FencingToken})
	hasReturned = true
	if err == nil {
		return result, c.complete(ending, claim, result)
	}
	if errors.Is(context.Cause(working), ErrLeaseLost) {
		return result, fmt.Errorf("%w: %w", ErrLeaseLost, err)
	}
	c.fail(ending, claim, err, ctx.Err() == nil)
	return result, err
}

const (
	forever      = time.Duration(-1)
	firstPause   = 20 * time.Millisecond
	longestPause = time.Second
	longestWait  = 20 * time.Second
	answerLimit  = 10 * time.Second
)

type answer struct {
	State        string          `json:"state"`
	Claim        string          `json:"claim"`
	Attempt      int             `json:"attempt"`
	Recovered    bool            `json:"recovered"`
	LeaseMs      int64           `json:"lease_ms"`
	FencingToken uint64          `json:"fencing_token"`
	Result       json.RawMessage `json:"result"`
	ResultBase64 []byte          `json:"result_base64"`
	ResultLost   string          `json:"result_lost"`
	RetryInMs    int64           `json:"retry_in_ms"`
	Reason       string          `json:"reason"`
	Detail       string          `json:"detail"`
	Claims       []struct {
		State string `json:"state"`
	} `json:"claims"`
}

// begin notes that a call begins. It returns false when the client is closed.
func (c *Client) begin() bool {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if !c.isClosed {
		c.running.Add(1)
	}
	return !c.isClosed
}

// confirm extends a claim whose lease may be nearly over. It returns its state, and when it was asked for.
func (c *Client) confirm(ctx context.Context, claim string) (string, time.Time) {
	sentAt := time.Now()
	body := map[string]any{"claims": []string{claim}}
	status, got, _ := c.post(ctx, "/v1/claims/extend", body, c.config.Patience)
	if status != http.StatusOK || len(got.Claims) != 1 {
		return "unknown", sentAt
	}
	return got.Claims[0].State, sentAt
}

func (c *Client) claim(ctx context.Context, of *call) (*answer, time.Time, error) {
	began, pause := time.Now(), firstPause
	answeredAt := began
	// Before any request with this nonce that may have been granted: a repeat gets the same grant, and not a new lease.
	var since time.Time
	for {
		left := longestWait
		if of.wait != forever {
			left = max(0, min(longestWait, of.wait-time.Since(began)))
		}
		of.request["wait_ms"] = left.Milliseconds()
		sentAt := time.Now()
		if since.IsZero() {
			nonce := make([]byte, 16)
			if _, err := rand.Read(nonce); err != nil {
				return nil, sentAt, fmt.Errorf("%w: %w", ErrUnavailable, err)
			}
			of.request["nonce"], since = fmt.Sprintf("%x", nonce), sentAt
		}
		status, got, err := c.post(ctx, "/v1/claims", of.request, left+c.config.Patience)
		if status == http.StatusCreated && got.State == "granted" {
			fresh := time.Duration(got.LeaseMs) * time.Millisecond / extends
			if time.Since(since) < fresh || ctx.Err() != nil {
				return got, since, nil
			}
			// Much of its lease is over, by a wait or a lost answer: it begins under a fresh one.
			state, extendedAt := c.confirm(ctx, got.Claim)
			if state == "extended" && time.Since(extendedAt) < fresh {
				return got, extendedAt, nil
			}
			if state != "unknown" {
				answeredAt = time.Now()
			}
			if state != "unknown" && state != "extended" {
				since = time.Time{} // another one has taken over, and nothing was run
			}
			status, got = 0, &answer{Detail: "the claim was not confirmed in time"}
		}
		switch {
		case ctx.Err() != nil:
			return nil, sentAt, ctx.Err()
		case status == http.StatusOK && got.State == "completed":
			return got, sentAt, nil
		case got.State == "given-up":
			return nil, sentAt, fmt.Errorf("%w: %s", ErrGivenUp, got.Reason)
		case got.State == "mismatch":
			return nil, sentAt, ErrMismatch
		case got.State == "busy":
			answeredAt, since = time.Now(), sentAt
			retryIn := time.Duration(got.RetryInMs) * time.Millisecond
			if of.wait != forever && time.Since(began)+min(retryIn, firstPause) >= of.wait {
				return nil, sentAt, &BusyError{retryIn}
			}
			err = sleep(ctx, min(retryIn, pause))
		case !isWorthRepeating(status):
			return nil, sentAt, fmt.Errorf("%w: %s: %s", ErrRefused, got.State, got.Detail)
		case time.Since(answeredAt) >= c.config.Patience:
			return nil, sentAt, fmt.Errorf("%w: %s %v", ErrUnavailable, got.Detail, err)
		default:
			// It may have been granted: the same nonce gets the same grant.
			err = sleep(ctx, pause)
		}
		if ctx.Err() != nil {
			return nil, sentAt, err
		}
		pause = min(pause*2, longestPause)
	}
}

func isWorthRepeating(status int) bool {
	switch status {
	case 0, 408, 429, 502, 503, 504:
		return true
	}
	return false
}

// isOpen tells whether the end of a claim is to be sent again: the work has happened, and a token that is rotated or a
// server that is moved comes back.
func isOpen(status int, got *answer) bool {
	switch status {
	case 401, 403, 404, 500:
		return true
	case 200:
		return got.State == ""
	}
	return isWorthRepeating(status)
}

func sleep(ctx context.Context, pause time.Duration) error {
	select {
	case <-time.After(pause):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// post sends a request. The status is 0 without an answer.
func (c *Client) post(ctx context.Context, path string, body any, limit time.Duration) (int, *answer, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	got := &answer{}
	text, err := json.Marshal(body)
	if err != nil {
		return http.StatusBadRequest, &answer{State: "request-invalid", Detail: err.Error()}, err
	}
	token := c.config.Token
	if c.config.TokenFile != "" {
		file, err := os.ReadFile(c.config.TokenFile)
		if err != nil {
			return 0, got, err
		}
		token, _, _ = strings.Cut(strings.TrimSpace(string(file)), "\n")
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, c.config.URL+path, bytes.NewReader(text))
	if err != nil {
		return http.StatusBadRequest, got, err
	}
	request.Header.Set("content-type", "application/json")
	request.Header.Set("authorization", "Bearer "+strings.TrimSpace(token))
	response, err := c.config.HTTP.Do(request)
	if err != nil {
		return 0, got, err
	}
	defer response.Body.Close()
	text, err = io.ReadAll(response.Body)
	if err == nil {
		err = json.Unmarshal(text, got)
		if err != nil && response.StatusCode >= 400 { // of something in between: only its refusal counts
			return response.StatusCode, &answer{Detail: response.Status}, nil
		}
	}
	if err != nil {
		return 0, &answer{}, err
	}
	return response.StatusCode, got, nil
}

// end repeats the end of a claim until its outcome is known. The status is 0 if it stays unknown.
func (c *Client) end(ctx context.Context, path string, body any, patience time.Duration) (int, *answer) {
	began, pause := time.Now(), firstPause
	for {
		status, got, err := c.post(ctx, path, body, answerLimit)
		if !isOpen(status, got) {
			return status, got
		}
		if time.Since(began) >= patience {
			return 0, &answer{Detail: fmt.Sprint(got.Detail, " ", err)}
		}
		time.Sleep(pause)
		pause = min(pause*2, longestPause)
	}
}

func (c *Client) complete(ctx context.Context, of *held, result any) error {
	form := map[string]any{"claim": of.claim}
	without := map[string]any{"claim": of.claim, "without_result": true}
	if raw, ok := result.([]byte); ok {
		form["result_base64"] = raw // as JSON, bytes are base64
	} else if text, err := json.Marshal(result); err == nil {
		form["result"] = json.RawMessage(text)
	} else {
		slog.Warn("the work is recorded without its result, which is no JSON", "error", err)
		form = without
	}
	status, got := c.end(ctx, "/v1/claims/complete", form, c.config.Settle)
	if status == http.StatusRequestEntityTooLarge || status == http.StatusBadRequest {
		slog.Warn("the work is recorded without its result, which is too large or no JSON")
		status, got = c.end(ctx, "/v1/claims/complete", without, c.config.Settle)
	}
	switch {
	case status == http.StatusOK:
		return nil
	case got.State == "lease-lost":
		return fmt.Errorf("%w: its result counts", ErrLeaseLost)
	}
	return fmt.Errorf("%w: %s", ErrOutcomeUnknown, got.Detail)
}

func (c *Client) fail(ctx context.Context, of *held, err error, counted bool) {
	end := &failure{path: "/v1/claims/release", counted: counted}
	errors.As(err, &end)
	body := map[string]any{"claim": of.claim, "reason": fmt.Sprintf("%.1000s", err.Error())}
	if end.path == "/v1/claims/release" {
		body["counted"] = end.counted && counted
		if end.retryIn != nil {
			body["retry_in_ms"] = end.retryIn.Milliseconds()
		}
	}
	if status, got := c.end(ctx, end.path, body, c.config.Patience); status != http.StatusOK {
		slog.Warn("the failed attempt was not released, so its lease lapses", "detail", got.Detail)
	}
}

func resultOf(got *answer, result any) error {
	if got.ResultLost != "" {
		return fmt.Errorf("%w: %s", ErrResultLost, got.ResultLost)
	}
	if raw, ok := result.(*[]byte); ok && got.ResultBase64 != nil {
		*raw = got.ResultBase64
		return nil
	}
	if err := json.Unmarshal(got.Result, result); err != nil {
		return fmt.Errorf("%w: %w", ErrResultLost, err)
	}
	return nil
}
