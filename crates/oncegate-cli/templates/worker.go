// A worker of oncegate. It gets each order once, as a line of JSON on standard input, and answers with a line of JSON.
package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"log"
	"net/http"
	"os"
	"time"
)

// downstream is set by `oncegate prove`, which tries this worker: the address of what stands for your bank.
var downstream = os.Getenv("ONCEGATE_DOWNSTREAM")

var bank = http.Client{Timeout: 10 * time.Second}

type message struct {
	Type           string `json:"type"`
	ID             string `json:"id"`
	IdempotencyKey string `json:"idempotency_key"`
	Payload        string `json:"payload"`
}

type order struct {
	OrderID string      `json:"order_id"`
	Amount  json.Number `json:"amount"`
}

type answer struct {
	ID      string `json:"id"`
	Outcome string `json:"outcome"`
	Reason  string `json:"reason,omitempty"`
	Result  any    `json:"result,omitempty"`
}

// charge is your effect. The key is the same in every attempt for this order: pass it to the systems that you call.
func charge(o order, idempotencyKey string) error {
	if downstream != "" {
		return callBank(o, idempotencyKey)
	}
	charges, err := os.OpenFile("charges.txt", os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer charges.Close()
	_, err = fmt.Fprintf(charges, "%s %s\n", o.OrderID, o.Amount)
	return err
}

func callBank(o order, idempotencyKey string) error {
	body, err := json.Marshal(o)
	if err != nil {
		return err
	}
	request, err := http.NewRequest(http.MethodPost, downstream+"/effects", bytes.NewReader(body))
	if err != nil {
		return err
	}
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("Idempotency-Key", idempotencyKey)
	response, err := bank.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("the bank answers with %s", response.Status)
	}
	return nil
}

func handle(m message) answer {
	var o order
	if err := json.Unmarshal([]byte(m.Payload), &o); err != nil {
		return answer{ID: m.ID, Outcome: "dead-letter", Reason: "it is no order"}
	}
	if err := charge(o, m.IdempotencyKey); err != nil {
		return answer{ID: m.ID, Outcome: "retry", Reason: err.Error()}
	}
	return answer{ID: m.ID, Outcome: "complete", Result: map[string]string{"charged": o.OrderID}}
}

func main() {
	// The answers keep standard output for themselves. What else is printed goes to standard error, and oncegate writes
	// that into its log.
	answers := os.Stdout
	os.Stdout = os.Stderr
	fmt.Fprintln(answers, `{"type":"ready","v":1}`)
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 16<<20) // the longest line of the protocol
	say := json.NewEncoder(answers)
	for lines.Scan() {
		var m message
		if err := json.Unmarshal(lines.Bytes(), &m); err != nil {
			log.Fatal(err)
		}
		// The other type is "cancel": this worker handles one message at a time, so it has answered by then.
		if m.Type != "message" {
			continue
		}
		outcome := handle(m)
		err := say.Encode(outcome)
		if err != nil && outcome.Result != nil {
			// The order is charged, so it must not run again because its result is no JSON.
			log.Print(err)
			outcome.Result = nil
			err = say.Encode(outcome)
		}
		if err != nil {
			log.Fatal(err)
		}
	}
}
